"""Equations that hand a narrow input on without computing with its numbers."""

from __future__ import annotations

from jax.extend.core import JaxprEqn

from jaxamp.core.taxonomy import Trait, lookup

# Nobody differentiates.
INLINED = ("closed_call", "custom_jvp_call", "custom_vjp_call", "fused_group", "remat2")


def only_moves(eqn: JaxprEqn) -> bool:
    """Return whether an equation moves numbers of any dtype, and computes none."""
    op = lookup(eqn.primitive)
    return op is not None and op.trait is Trait.SHAPE and not op.dtype_params
