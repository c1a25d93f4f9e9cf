"""Compiles attention for a chip that is not there; run inside the environment of its compiler.

python -m tests.found.attention.kernels.attention_programs TARGET FOLDER: writes FOLDER/found.json,
a row for each program: its custom calls, and the bytes of its temporary memory.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

B, T, N, H = 2, 1024, 8, 64


KERNELS = ("tpu_custom_call", "fmha")  # words in the names of their calls


def programs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and changes of each program: to shapes, dtype, or the specification."""
    yield "causal", {"causal": True}
    yield "whole", {}
    yield "window", {"causal": True, "window": 256}
    yield "grouped", {"causal": True, "key_heads": 2}
    yield "cross", {"keys": 512}
    yield "bias of heads", {"bias": (1, N, T, T)}
    yield "bias of all", {"bias": (B, N, T, T)}
    yield "bias of keys", {"bias": (B, 1, 1, T)}
    yield "float16", {"dtype": "float16", "causal": True}
    yield "head 128", {"head": 128, "causal": True}
    yield "head 256", {"head": 256, "causal": True}
    yield "head 40", {"head": 40}
    yield "head 100", {"head": 100, "causal": True}
    yield "head 300", {"head": 300}
    yield "odd length", {"length": 1023, "keys": 1023}
    yield "scale that rounds", {"scale": 0.1, "causal": True}
    yield "grouped, scale that rounds", {"scale": 0.1, "causal": True, "key_heads": 2}
    yield "vmap", {"vmap": True, "causal": True}
    yield "segments", {"numbers": np.arange(T) // 128, "causal": True}
    yield "unequal segments", {"numbers": np.arange(T) // 384, "causal": True}
    yield "mixed segments", {"numbers": np.arange(T) % 2}
    yield "window to both sides", {"seen": abs(np.arange(T)[:, None] - np.arange(T)) < 256}


def program(words: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Value and gradients of one attention, and the types of its arguments."""
    import jax
    import jax.numpy as jnp

    from jaxamp.found.attention.kernels.known_masks import known_mask
    from jaxamp.found.attention.kernels.spec import AttentionSpec
    from tests.found.attention.kernels.calls import attention

    length, head = words.get("length", T), words.get("head", H)
    dtype = words.get("dtype", "bfloat16")
    mask: Any = None
    if "numbers" in words:
        words = {"seen": words["numbers"][:, None] == words["numbers"], **words}
    if "seen" in words:
        mask = known_mask(words["seen"])
    scale, causal = words.get("scale", 0.125), words.get("causal", False)
    spec = AttentionSpec(scale, causal, words.get("window"), mask)
    queries = (B, length, N, head)
    keys = (B, words.get("keys", length), words.get("key_heads", N), head)
    shapes = [(queries, dtype), (keys, dtype), (keys, dtype)]
    shapes += [(words["bias"], "float32")] if "bias" in words else []

    def loss(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        return jnp.sum(attention(q, k, v, bias, spec).astype(jnp.float32) ** 2)

    gradient = jax.value_and_grad(loss, tuple(range(len(shapes))))
    avals = tuple(jax.ShapeDtypeStruct(*x) for x in shapes)
    if words.get("vmap"):
        one = tuple(jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in avals)
        return jax.vmap(gradient), one
    return gradient, avals


def main(name: str, folder: Path) -> None:
    """Compiles for one target."""
    from jaxamp.compiled.targets import TARGETS, compile_for

    found = {}
    for title, words in programs():
        fn, avals = program(words)
        compiled = compile_for(TARGETS[name], fn, avals)
        calls = re.findall(r'custom_call_target="([^"]+)"', compiled.as_text())
        found[title] = {
            "calls": [c for c in calls if any(word in c for word in KERNELS)],
            "temporary": compiled.memory_analysis().temp_size_in_bytes,
        }
        print(title, found[title], flush=True)
    (folder / "found.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
