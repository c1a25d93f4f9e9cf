"""Programs of functions with a derivative of their own.

What a rule computes forward, and its cotangents of what it was given, are two programs, which JAX
makes. Tokens are followed through both like through any other, so nothing is known of a rule: its
cotangents need not be the derivative of anything, nor linear in those of its results.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.jaxprs.nested import called


def programs_of(eqn: JaxprEqn) -> tuple[ClosedJaxpr, ClosedJaxpr, list[int]]:
    """Return the programs of an equation that holds a function with a derivative of its own.

    The first returns its results, and after them what the second reads; that is given cotangents of
    the results before these, and returns those of the operands that have any, whose indices follow.
    """
    avals: list[Any] = [v.aval for v in eqn.invars]
    captured = eqn.params["num_consts"]  # operands before the others, without a derivative
    moving = [
        i for i, v in enumerate(avals) if i >= captured and jnp.issubdtype(v.dtype, jnp.floating)
    ]
    count, structure = len(eqn.outvars), jax.tree.structure(None)

    def forward(*operands: Any) -> list[Any]:
        nonlocal structure

        def of(*floats: Any) -> list[Any]:
            given = dict(enumerate(operands)) | dict(zip(moving, floats, strict=True))
            return jax_compat.bind(eqn, [*given.values()])

        outs, pull = jax.vjp(of, *(operands[i] for i in moving))
        saved, structure = jax.tree.flatten(pull)
        return [*outs, *saved]

    def backward(*given: Any) -> list[Any]:
        return [*jax.tree.unflatten(structure, given[count:])([*given[:count]])]

    debug_info = called(eqn).jaxpr.debug_info
    first = jax_compat.trace_to_jaxpr(forward, avals, debug_info)
    second = jax_compat.trace_to_jaxpr(backward, first.out_avals, debug_info)
    if any(isinstance(const, Tracer) for const in (*first.consts, *second.consts)):
        raise ValueError("it captures an array of a function around it")
    return first, second, moving
