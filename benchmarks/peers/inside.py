"""python inside.py FOLDER: one peer on its programs, run by path in the peer's environment.

Reads FOLDER/job.json: the adapter, the programs, the platforms. Writes FOLDER/result.json, the
gradients as NAME.npz, and NAME-PLATFORM.bin, the exported value and gradient at the large size.
Needs JAX and what the adapter imports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Sizes = dict[str, int]
SMALL: Sizes = {"batch": 4, "length": 32, "width": 64, "heads": 4, "layers": 2, "words": 64}
LARGE: Sizes = {"batch": 8, "length": 512, "width": 512, "heads": 8, "layers": 2, "words": 8192}
LOW = jnp.bfloat16


# The programs, in float32 as users write them.


def norm(x: Any, scale: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return scale * x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def attention(q: Any, k: Any, v: Any, heads: int) -> Any:
    q, k, v = (x.reshape(*x.shape[:-1], heads, -1) for x in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*v.shape[:2], -1)


def layer(x: Any, w: Any, heads: int) -> Any:
    q, k, v = jnp.split(norm(x, w["norm1"]) @ w["qkv"], 3, -1)
    x = x + attention(q, k, v, heads) @ w["out"]
    return x + jax.nn.gelu(norm(x, w["norm2"]) @ w["up"]) @ w["down"]


def cross_entropy(logits: Any, words: Any) -> Any:
    picked = jnp.take_along_axis(logits, words[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def block(heads: int) -> Callable[..., Any]:
    """A transformer whose layers are written out."""

    def loss(params: Any, words: Any) -> Any:
        x = params["embed"][words]
        for index in range(params["layers"]["out"].shape[0]):
            x = layer(x, {k: v[index] for k, v in params["layers"].items()}, heads)
        return cross_entropy(norm(x, params["norm"]) @ params["embed"].T, words)

    return loss


def scanned(heads: int) -> Callable[..., Any]:
    """The same, its layers scanned."""

    def loss(params: Any, words: Any) -> Any:
        x = lax.scan(
            lambda x, w: (layer(x, w, heads), None), params["embed"][words], params["layers"]
        )[0]
        return cross_entropy(norm(x, params["norm"]) @ params["embed"].T, words)

    return loss


def whitened(heads: int) -> Callable[..., Any]:
    """The same with a Cholesky factor of the features' covariance in it."""

    def loss(params: Any, words: Any) -> Any:
        x = params["embed"][words].reshape(-1, params["embed"].shape[1])
        covariance = x.T @ x / len(x) + jnp.eye(x.shape[1])
        factor = jnp.linalg.cholesky(covariance)
        x = lax.linalg.triangular_solve(factor, x.T, left_side=True, lower=True).T
        return cross_entropy(x @ params["layers"]["up"][0], words.reshape(-1))

    return loss


def make_params(size: Sizes, dtype: Any = np.float32) -> Any:
    rng, width, layers = np.random.default_rng(0), size["width"], size["layers"]

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(dtype)

    return {
        "embed": (rng.normal(size=(size["words"], width))).astype(dtype),
        "norm": np.ones(width, dtype),
        "layers": {
            "norm1": np.ones((layers, width), dtype),
            "norm2": np.ones((layers, width), dtype),
            "qkv": normal(layers, width, 3 * width),
            "out": normal(layers, width, width),
            "up": normal(layers, width, 4 * width),
            "down": normal(layers, 4 * width, width),
        },
    }


def make_words(size: Sizes) -> np.ndarray:
    return np.random.default_rng(1).integers(0, size["words"], (size["batch"], size["length"]))


def module(heads: int, **options: Any) -> Any:
    """The same block as flax modules; `options` are those of every Dense and LayerNorm."""
    import flax.linen as nn

    dense = dict(options.items())
    plain = {k: v for k, v in options.items() if k == "dtype"}

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            width = x.shape[-1]
            y = nn.LayerNorm(use_bias=False, **plain)(x)
            q, k, v = jnp.split(nn.Dense(3 * width, use_bias=False, **dense)(y), 3, -1)
            x = x + nn.Dense(width, use_bias=False, **dense)(attention(q, k, v, heads))
            y = nn.LayerNorm(use_bias=False, **plain)(x)
            y = jax.nn.gelu(nn.Dense(4 * width, use_bias=False, **dense)(y))
            return x + nn.Dense(width, use_bias=False, **dense)(y)

    class Model(nn.Module):
        layers: int
        words: int

        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(self.layers):
                x = Layer()(x)
            x = nn.LayerNorm(use_bias=False, **plain)(x)
            return nn.Dense(self.words, use_bias=False, **dense)(x)

    return Model


def make_module(size: Sizes, convert: Any = lambda model, x: model, **options: Any) -> Any:
    """A loss of flax modules, its variables, and its inputs (given embedded)."""
    model = module(size["heads"], **options)(size["layers"], size["words"])
    x = np.random.default_rng(2).normal(size=(size["batch"], size["length"], size["width"]))
    x, words = x.astype(np.float32), make_words(size)
    model = convert(model, x)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    state = {k: v for k, v in variables.items() if k != "params"}

    def loss(params: Any, x: Any, words: Any) -> Any:
        logits = model.apply({"params": params, **state}, x)
        return cross_entropy(logits.astype(jnp.float32), words)

    return loss, variables["params"], x, words


# What a user of each library writes: the loss in, value and gradient out.


def f32(loss: Any) -> Any:
    return jax.value_and_grad(loss)


def ours(loss: Any) -> Any:
    import jaxamp

    return jax.value_and_grad(jaxamp.amp(loss))


def ours_around(loss: Any) -> Any:
    import jaxamp

    return jaxamp.amp(jax.value_and_grad(loss))


def jmp(loss: Any) -> Any:
    import jmp

    policy = jmp.get_policy("p=f32,c=bf16,o=f32")

    def cast(*args: Any) -> Any:
        return policy.cast_to_output(loss(*policy.cast_to_compute(args)))

    return jax.value_and_grad(cast)


def mpx(loss: Any) -> Any:
    import mpx  # pyright: ignore[reportMissingImports]

    mpx.set_half_precision_datatype(jnp.bfloat16)
    scaling = mpx.DynamicLossScaling(jnp.float32(1.0), jnp.float32(1.0))
    gradient = mpx.filter_value_and_grad(loss, scaling)

    def value_and_grad(*args: Any) -> Any:
        value, _, _, grads = gradient(*args)
        return value, grads

    return value_and_grad


def grampax(loss: Any) -> Any:
    import grampax  # pyright: ignore[reportMissingImports]

    return jax.value_and_grad(grampax.autocast(loss, LOW))


def jaxamp_of_2023(loss: Any) -> Any:
    import jaxamp

    theirs: Any = jaxamp.amp  # another package of that name
    return jax.value_and_grad(theirs(loss, compute_dtype=LOW))


def flax_fp8() -> dict[str, Any]:
    import flax.linen as nn

    return {"dot_general_cls": nn.Fp8DirectDotGeneralOp, "dtype": LOW}


def qwix(model: Any, x: Any) -> Any:
    import qwix  # pyright: ignore[reportMissingImports]

    rule = qwix.QtRule(
        module_path=".*", weight_qtype=jnp.float8_e4m3fn, act_qtype=jnp.float8_e4m3fn,
        bwd_qtype=jnp.float8_e5m2,
    )  # fmt: skip
    return qwix.quantize_model(model, qwix.QtProvider([rule]))


FUNCTIONS = {"block": block, "scanned": scanned, "whitened": whitened}


def program(adapter: str, name: str, size: Sizes) -> tuple[Any, tuple[Any, ...]]:
    """Value and gradient of a program under an adapter, and its arguments."""
    if name != "module":
        return globals()[adapter](FUNCTIONS[name](size["heads"])), (
            make_params(size),
            make_words(size),
        )
    if adapter == "flax_dtype":
        loss, *args = make_module(size, dtype=LOW)
    elif adapter == "flax_fp8":
        loss, *args = make_module(size, **flax_fp8())
    elif adapter == "qwix":
        loss, *args = make_module(size, convert=qwix)
    else:
        loss, *args = make_module(size)
    apply = globals().get(adapter, f32) if adapter in ("ours", "ours_around") else f32
    return apply(loss), tuple(args)


def run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Every program of a job; what fails is recorded with its first line."""
    results: dict[str, Any] = {"jax": jax.__version__, "python": sys.version.split()[0]}
    for name in job["programs"]:
        try:
            fn, args = program(job["adapter"], name, SMALL)
            value, grads = jax.jit(fn)(*args)
            leaves = [np.asarray(g, np.float64) for g in jax.tree_util.tree_leaves(grads)]
            np.savez(folder / f"{name}.npz", *leaves)
            results[name] = {"value": float(value), "finite": bool(np.isfinite(value))}
        except Exception as error:
            line = (str(error).strip().splitlines() or [""])[0][:160]
            results[name] = {"error": f"{type(error).__name__}: {line}"}
            continue
        for platform in job["platforms"]:
            if name in ("block", "module"):
                results[name][platform] = export(job["adapter"], name, folder, platform)
    return results


def export(adapter: str, name: str, folder: Path, platform: str) -> str:
    """Writes the program at its large size for a platform; an empty word, or what went wrong."""
    try:
        from jax import export as jax_export

        fn, args = program(adapter, name, LARGE)
        leaves, tree = jax.tree_util.tree_flatten(args)

        def flat(*arrays: Any) -> Any:  # the compilers' side knows no trees
            return jax.tree_util.tree_leaves(fn(*jax.tree_util.tree_unflatten(tree, arrays)))

        types = [
            jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in leaves
        ]
        made = jax_export.export(jax.jit(flat), platforms=[platform])(*types)
        (folder / f"{name}-{platform}.bin").write_bytes(made.serialize())
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"


def reference(folder: Path) -> None:
    """Gradients in float64, for the errors."""
    jax.config.update("jax_enable_x64", True)
    for name, make in FUNCTIONS.items():
        params = make_params(SMALL, np.float64)
        grads = jax.jit(jax.grad(make(SMALL["heads"])))(params, make_words(SMALL))
        np.savez(folder / f"{name}.npz", *map(np.asarray, jax.tree_util.tree_leaves(grads)))
    loss, params, x, words = make_module(SMALL, dtype=jnp.float64)
    grads = jax.jit(jax.grad(loss))(
        jax.tree_util.tree_map(np.float64, params), np.float64(x), words
    )
    np.savez(folder / "module.npz", *map(np.asarray, jax.tree_util.tree_leaves(grads)))


if __name__ == "__main__":
    where = Path(sys.argv[1])
    if len(sys.argv) > 2:
        reference(where)
    else:
        found = run(json.loads((where / "job.json").read_text()), where)
        (where / "result.json").write_text(json.dumps(found))
