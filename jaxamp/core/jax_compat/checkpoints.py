"""What ``jax.checkpoint`` saves, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src.interpreters import partial_eval as _pe
from jax.extend.core import Jaxpr, JaxprEqn, Literal


def is_saved(policy: Callable[..., Any], eqn: JaxprEqn) -> bool:
    """Whether a checkpoint policy keeps what an equation makes, on the device or elsewhere."""
    case = policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)
    return _pe.ensure_enum(case) is not _pe.Recompute


def read_again(jaxpr: Jaxpr) -> list[bool]:
    """Which operands of a checkpoint's backward pass its forward pass reads, once more.

    >>> import jax
    >>> square = jax.checkpoint(lambda x: jax.numpy.sin(x) ** 2)
    >>> [read_again(e.params["jaxpr"]) for e in jax.make_jaxpr(jax.grad(square))(1.0).eqns[-1:]]
    [[True, False]]
    """
    again = {
        var
        for eqn in jaxpr.eqns
        if any(getattr(s, "name", None) == _AGAIN for s in eqn.source_info.name_stack.stack)
        for var in eqn.invars
        if not isinstance(var, Literal)
    }
    return [var in again for var in jaxpr.invars]


_AGAIN = "rematted_computation"  # the scope of what a backward pass computes again
