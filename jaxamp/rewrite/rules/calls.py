"""Calls: equations that hold a jaxpr and run it at most once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.jaxprs.interpret import bind_nested
from jaxamp.jaxprs.nested import nested
from jaxamp.plan import Decision
from jaxamp.rewrite.interpreter import rewritten
from jaxamp.rewrite.primitives.accumulate import accumulate_p, original
from jaxamp.rewrite.primitives.narrow_collective import sent, travel_p
from jaxamp.rewrite.registry import Context, rewrites


@rewrites("jit", "closed_call", "call", "composite", "compute_on", "custom_vmap_call")
@rewrites("eval_jaxpr", "fused_call", "xla_metadata_call")
def call(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """Rewrites what is called; a jit keeps its name, shardings and donation."""
    if not decision.inner:  # a region that an inner `amp` has rewritten
        return jax_compat.bind(eqn, operands)
    return bind_nested(eqn, operands, _bodies(context, eqn, decision))


@rewrites("remat2")
def checkpoint(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """Stays a checkpoint of the same policy; what it saves is what is stored."""
    policy = _sees_originals(eqn.params["policy"])
    return bind_nested(eqn, operands, _bodies(context, eqn, decision), policy=policy)


def _bodies(context: Context, eqn: JaxprEqn, decision: Decision) -> list[ClosedJaxpr]:
    """Rewrite the jaxprs that an equation holds."""
    return [rewritten(context, *pair) for pair in zip(nested(eqn), decision.inner, strict=True)]


def _sees_originals(policy: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The same checkpoint policy, shown the primitive that one of ours stands for."""
    if policy is None:
        return None

    @functools.wraps(policy)
    def shown(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive is accumulate_p:
            primitive, params = original(params)
        elif primitive is travel_p:
            primitive, params = sent(params)
        return policy(primitive, *avals, **params)

    return shown
