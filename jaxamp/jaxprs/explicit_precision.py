"""Explicit precisions of products: `precision=`, or an algorithm, in a program itself."""

from __future__ import annotations

from jax import lax
from jax.extend.core import JaxprEqn

EXPLICIT_PRECISION = "an explicit precision was requested"


def has_explicit_precision(eqn: JaxprEqn) -> bool:
    """Return whether an equation names a precision above the default, or an algorithm."""
    precision = eqn.params.get("precision")
    pair = precision if isinstance(precision, tuple) else (precision,)
    return any(p is not None and p != lax.Precision.DEFAULT for p in pair)
