"""Compare attention under masks that are known with the same under masks that are arguments.

    python -m benchmarks.known_masks --target h200
    python -m benchmarks.known_masks --target v5e --mask "8 segments"

Value and gradient of one attention with its projections, 4 x 4,096 words x 16 heads x 64, are
compiled for a chip that is not there (``python -m jaxamp estimate --install gpu``, or ``tpu``).
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jaxamp
from jaxamp.compiled.targets import TARGETS

B, T, N, H = 4, 4096, 16, 64
POLICY = jaxamp.PrecisionPolicy.MIXED_BF16.replace(fused_attention=True)

WORDS = np.arange(T)
NUMBERS = {
    "8 segments": WORDS // 512,
    "segments of 500, 1,100, 1,496 and 1,000": np.repeat(range(4), [500, 1100, 1496, 1000]),
    "2 segments, mixed": WORDS // 512 % 2,
}
MASKS = {
    **{name: number[:, None] == number for name, number in NUMBERS.items()},
    "256 words to both sides": np.abs(WORDS[:, None] - WORDS) < 256,
}


def loss(weights: dict[str, Any], x: Any, seen: Any) -> Any:
    """A number made of what an attention returns."""
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, weights[name]) for name in "qkv")
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    attended = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(seen, scores, -1e9)), v)
    return jnp.mean((x + jnp.einsum("btnh,nhd->btd", attended, weights["o"])) ** 2)


def figures(target: str, *known: np.ndarray) -> list[str]:
    """Bytes that kernels read and write, and those of temporary memory, as a table has them."""
    argument = () if known else (jax.ShapeDtypeStruct((T, T), bool),)

    def step(weights: Any, x: Any, *seen: Any) -> Any:
        return jax.value_and_grad(loss)(weights, x, *map(jnp.asarray, seen or known))

    shapes = {name: jax.ShapeDtypeStruct((N * H, N, H), jnp.float32) for name in "qkv"}
    shapes["o"] = jax.ShapeDtypeStruct((N, H, N * H), jnp.float32)
    x = jax.ShapeDtypeStruct((B, T, N * H), jnp.float32)
    found = jaxamp.estimate(step, POLICY, target)(shapes, x, *argument).compiled[1]
    return [f"{n / 1e9:.3f} GB" for n in (found.bytes, found.temporary)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.known_masks", description=__doc__)
    parser.add_argument("--target", required=True, choices=TARGETS)
    parser.add_argument("--mask", nargs="+", choices=MASKS, default=[*MASKS])
    options = parser.parse_args()
    shown = Table("mask", "bytes moved", "temporary", title=f"compiled for {options.target}")
    shown.add_row("an argument", *figures(options.target))
    for name in options.mask:
        shown.add_row(name, *figures(options.target, MASKS[name]))
    Console(width=100).print(shown)


if __name__ == "__main__":
    main()
