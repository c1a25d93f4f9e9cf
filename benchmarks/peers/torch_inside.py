"""python torch_inside.py FOLDER: PyTorch's autocast on the same programs, as `inside.py` does it.

On a CPU, where no program can be compiled for another chip. PyTorch has no scan.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from data import SMALL, make_params, make_words
from torch.nn import functional  # pyright: ignore[reportMissingImports]


def norm(x: Any, scale: Any) -> Any:
    return functional.layer_norm(x, x.shape[-1:], scale, eps=1e-6)


def attention(q: Any, k: Any, v: Any, heads: int) -> Any:
    q, k, v = (x.reshape(*x.shape[:-1], heads, -1) for x in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    weights = scores.masked_fill(~mask, -1e30).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2)


def layer(x: Any, w: Any, heads: int) -> Any:
    q, k, v = (norm(x, w["norm1"]) @ w["qkv"]).chunk(3, -1)
    x = x + attention(q, k, v, heads) @ w["out"]
    up = norm(x, w["norm2"]) @ w["up"]
    return x + functional.gelu(up, approximate="tanh") @ w["down"]


def cross_entropy(logits: Any, words: Any) -> Any:
    return functional.cross_entropy(logits.flatten(0, -2), words.flatten())


def block(params: Any, words: Any) -> Any:
    """The transformer, its layers written out."""
    x = params["embed"][words]
    for index in range(SMALL["layers"]):
        x = layer(x, {k: v[index] for k, v in params["layers"].items()}, SMALL["heads"])
    return cross_entropy(norm(x, params["norm"]) @ params["embed"].T, words)


def whitened(params: Any, words: Any) -> Any:
    """A Cholesky factor of the features' covariance, and one matrix after it."""
    x = params["embed"][words].flatten(0, -2)
    covariance = x.T @ x / len(x) + torch.eye(x.shape[1])
    factor = torch.linalg.cholesky(covariance)
    x = torch.linalg.solve_triangular(factor, x.T, upper=False).T
    return cross_entropy(x @ params["layers"]["up"][0], words)


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {"block": block, "whitened": whitened}


def leaves(tree: dict[str, Any]) -> list[Any]:
    """The leaves in JAX's order: by sorted keys."""
    values = [tree[key] for key in sorted(tree)]
    return [x for v in values for x in (leaves(v) if isinstance(v, dict) else [v])]


def tensors(tree: dict[str, Any]) -> dict[str, Any]:
    """The same tree of tensors that want a gradient."""
    return {
        k: tensors(v) if isinstance(v, dict) else torch.tensor(v, requires_grad=True)
        for k, v in tree.items()
    }


def differentiated(name: str, low: bool) -> tuple[float, list[np.ndarray]]:
    """Value and gradients of a program."""
    params, words = tensors(make_params(SMALL)), torch.tensor(make_words(SMALL))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
        value = PROGRAMS[name](params, words)
    value.backward()
    zeros = (torch.zeros_like(x) if x.grad is None else x.grad for x in leaves(params))
    return float(value.detach()), [np.asarray(g, np.float64) for g in zeros]


def run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Every program of a job; what fails is recorded with its first line."""
    results: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    for name in job["programs"]:
        try:
            value, grads = differentiated(name, job["adapter"] == "torch_autocast")
        except Exception as error:
            line = (str(error).strip().splitlines() or [""])[0][:160]
            results[name] = {"error": f"{type(error).__name__}: {line}"}
            continue
        np.savez(folder / f"{name}.npz", *grads)
        results[name] = {"value": value, "finite": bool(np.isfinite(value))}
    return results


if __name__ == "__main__":
    where = Path(sys.argv[1])
    found = run(json.loads((where / "job.json").read_text()), where)
    (where / "result.json").write_text(json.dumps(found))
