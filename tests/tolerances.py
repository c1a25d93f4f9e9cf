"""How far a mixed-precision result may be from the float32 one: the only table of its kind.

The bound of a leaf is a number of units in the last place (ulps) of the low format times the
leaf's reference magnitude. The magnitude is the leaf's largest float32 value plus what the float32
program itself moves by, in the same ulps, when each of its inputs is moved by one ulp: a program
is held to its own conditioning, not to a number found by trying.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CLASSES: dict[str, float] = {
    "exact": 0.0,  # bit for bit: integers, random draws, bits
    "f32": 0.0,  # nothing is gained by lowering, so nothing is lowered: see F32_ULPS
    "tight": 1.0,  # a few roundings, no product
    "dot": 1.5,  # products and what surrounds them
    "deep": 3.0,  # loops, normalised temperatures, whole training steps
    "fused": 64.0,  # of float32 itself: the same program, which XLA may fuse differently
}
"""Ulps of the low format for a function's value, by tolerance class."""

BY_ORDER = {0: 1.0, 1: 2.0, 2: 4.0}
"""Factor for a value, a first and a second derivative: each order rounds every step again."""

F32_ULPS = 64.0
"""Ulps of float32 for the class `f32`: XLA may fuse the two programs differently."""

EPS = {
    name: float(jnp.finfo(name).eps) for name in ("bfloat16", "float16", "float8_e4m3fn", "float32")
}


def moved(args: Any, low: str) -> Any:
    """`args` with every float32 array moved by one ulp of `low`, up and down by turns."""

    def move(leaf: Any) -> Any:
        if getattr(leaf, "dtype", None) != np.float32:
            return leaf
        sign = np.where(np.arange(leaf.size) % 3 == 0, -1, 1).reshape(leaf.shape)
        return (leaf * (1 + sign * EPS[low])).astype(np.float32)

    return jax.tree.map(move, args)


def bound(tolerance: str, order: int, low: str, reference: np.ndarray, nudged: np.ndarray) -> float:
    """The largest allowed difference of a leaf.

    Args:
        tolerance: a row of `CLASSES`.
        order: how often the program was differentiated.
        low: the low format, `bfloat16` or `float16`; `float32` for the class `fused`.
        reference: the float32 result.
        nudged: the float32 result for the arguments of `moved`.
    """
    size = _largest(reference)
    if tolerance == "f32":
        return F32_ULPS * EPS["float32"] * size
    ulps = CLASSES[tolerance] * BY_ORDER[order]
    return ulps * (EPS[low] * size + _largest(nudged - reference))


def _largest(x: np.ndarray) -> float:
    finite = np.abs(x[np.isfinite(x)])
    return float(finite.max()) if finite.size else 0.0
