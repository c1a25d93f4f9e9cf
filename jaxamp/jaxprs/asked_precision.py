"""Explicit precisions of products: what a program asks for itself."""

from __future__ import annotations

from jax import lax
from jax.extend.core import JaxprEqn

ASKED = "an explicit precision was requested"


def asks_precision(eqn: JaxprEqn) -> bool:
    """Return whether an equation names a precision above the default, or an algorithm."""
    asked = eqn.params.get("precision")
    pair = asked if isinstance(asked, tuple) else (asked,)
    return any(p is not None and p != lax.Precision.DEFAULT for p in pair)
