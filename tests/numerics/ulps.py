"""Errors in units in the last place of a low format: the only definition here.

An error is the largest difference of a result from the float32 one, divided by `eps` of the low
format times a reference magnitude. The magnitude is the largest float32 value of the same array,
so that elements which happen to cancel are not held to an accuracy that nothing around them has.
Where elements do not mix, each may be measured against its own magnitude instead.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LOW = {"bf16": jnp.dtype(jnp.bfloat16), "f16": jnp.dtype(jnp.float16)}
POLICIES = {"bf16": "auto_mixed_bf16", "f16": "auto_mixed"}


def error(value: Any, reference: Any, low: str, *, per_element: bool = False) -> float:
    """The largest error over all arrays of a result, in ulps of `low`.

    Args:
        value: a tree of arrays.
        reference: the float32 tree.
        low: a key of `LOW`.
        per_element: whether each element has its own magnitude.

    Returns:
        The error; infinite where a NaN or inf stands that the reference does not have.
    """
    pairs = zip(jax.tree.leaves(value), jax.tree.leaves(reference), strict=True)
    return max(_error(np.asarray(v), np.asarray(r), low, per_element) for v, r in pairs)


def _error(value: np.ndarray, reference: np.ndarray, low: str, per_element: bool) -> float:
    value, reference = value.astype(np.float64), reference.astype(np.float64)
    finite = np.isfinite(reference)
    if not np.array_equal(value[~finite], reference[~finite], equal_nan=True):
        return np.inf
    value, reference = value[finite], reference[finite]
    if not np.all(np.isfinite(value)):
        return np.inf
    difference = np.abs(value - reference)
    if not difference.any():
        return 0.0
    size = np.abs(reference) if per_element else np.abs(reference).max()
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(difference == 0, 0.0, difference / size)
    return float(ratio.max() / float(jnp.finfo(LOW[low]).eps))


def distance(value: Any, reference: Any, low: str) -> float:
    """How many numbers of `low` apart two trees of numbers of `low` are at most.

    Args:
        value: a tree of arrays.
        reference: a tree of arrays.
        low: a key of `LOW`; both trees are rounded to it.

    Returns:
        0 where they are equal (NaN to NaN); infinite where only one is NaN or infinite.
    """
    pairs = zip(jax.tree.leaves(value), jax.tree.leaves(reference), strict=True)
    return max(_distance(np.asarray(v), np.asarray(r), LOW[low]) for v, r in pairs)


def _distance(value: np.ndarray, reference: np.ndarray, dtype: np.dtype) -> float:
    value, reference = value.astype(dtype), reference.astype(dtype)
    finite = np.isfinite(reference.astype(np.float32))
    same = np.array_equal(value[~finite], reference[~finite], equal_nan=True)
    if not same or not np.all(np.isfinite(value[finite].astype(np.float32))):
        return np.inf
    steps = np.abs(_ordinal(value[finite]) - _ordinal(reference[finite]))
    return float(steps.max(initial=0))


def _ordinal(x: np.ndarray) -> np.ndarray:
    """The place of each 16-bit number among all of them; both zeros are 0."""
    bits = x.view(np.int16).astype(np.int32)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)
