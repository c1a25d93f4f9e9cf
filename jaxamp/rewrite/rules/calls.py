"""Calls: equations that hold one jaxpr, or several, and run each at most once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.jaxprs.nested import nested_params
from jaxamp.plan import Decision, JaxprPlan
from jaxamp.rewrite.interpreter import rewritten
from jaxamp.rewrite.primitives.accumulate import accumulate_p, original
from jaxamp.rewrite.primitives.narrow_collective import sent, travel_p
from jaxamp.rewrite.registry import Context, rewrites


@rewrites("jit")
def jit(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """Stays a jit of the same name, shardings and donation."""
    if not decision.inner:  # a region that an inner `amp` has rewritten
        return jax_compat.bind(eqn, operands)
    jaxpr = rewritten(context, eqn.params["jaxpr"], decision.inner[0])
    return jax_compat.bind(eqn, operands, jaxpr=jaxpr)


@rewrites("closed_call", "call")
def call(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """Calls the rewritten body."""
    body, plan = eqn.params["call_jaxpr"], decision.inner[0]
    if isinstance(body, ClosedJaxpr):
        return jax_compat.bind(eqn, operands, call_jaxpr=rewritten(context, body, plan))
    opened, consts = _rewritten_open(context, body, plan)
    return jax_compat.bind(eqn, [*consts, *operands], call_jaxpr=opened)


@rewrites("remat2")
def checkpoint(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """Stays a checkpoint of the same policy; what it saves is what is stored."""
    opened, consts = _rewritten_open(context, eqn.params["jaxpr"], decision.inner[0])
    policy = _sees_originals(eqn.params["policy"])
    return jax_compat.bind(eqn, [*consts, *operands], jaxpr=opened, policy=policy)


@rewrites("composite", "compute_on", "custom_vmap_call", "eval_jaxpr", "fused_call")
@rewrites("xla_metadata_call")
def nested(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """Rewrites every jaxpr in the parameters, with its signature kept."""
    changes: dict[str, Any] = {}
    for name, plan in zip(nested_params(eqn), decision.inner, strict=True):
        param = eqn.params[name]
        if isinstance(param, ClosedJaxpr):
            changes[name] = rewritten(context, param, plan)
        else:
            opened, consts = _rewritten_open(context, param, plan)
            changes[name] = param if consts else opened
    return jax_compat.bind(eqn, operands, **changes)


def _rewritten_open(context: Context, jaxpr: Jaxpr, plan: JaxprPlan) -> tuple[Jaxpr, Sequence[Any]]:
    """An open jaxpr, rewritten, and the constants that it takes as its first inputs."""
    return jax_compat.without_consts(rewritten(context, ClosedJaxpr(jaxpr, ()), plan))


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
