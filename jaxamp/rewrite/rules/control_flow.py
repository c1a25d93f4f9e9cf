"""Branches and loops: bodies rewritten, the rest of the equation as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.plan import Decision
from jaxamp.rewrite.interpreter import rewritten
from jaxamp.rewrite.registry import Context, parted, rewrites


@rewrites("cond")
def cond(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """All branches give the same dtypes: their plans agree on the results."""
    pairs = zip(eqn.params["branches"], decision.inner, strict=True)
    branches = tuple(rewritten(context, branch, plan) for branch, plan in pairs)
    return jax_compat.bind(eqn, operands, branches=branches)


@rewrites("scan")
def scan(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """The carry has one dtype on its way in, round and out; slices and stacks have their own.

    Casts of what is the same in every turn become invariants too.
    """
    jaxpr = rewritten(context, eqn.params["jaxpr"], decision.inner[0])
    operands, casts = parted(eqn, operands)
    layout = jax_compat.scan_with_invariants(eqn, len(casts))
    return jax_compat.bind(eqn, [*casts, *operands], jaxpr=jaxpr, **layout)


@rewrites("while")
def while_loop(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """The carry keeps its dtype, and the test is left in f32."""
    test, body = decision.inner
    operands, casts = parted(eqn, operands)
    ahead = eqn.params["cond_nconsts"]
    return jax_compat.bind(
        eqn,
        [*operands[:ahead], *casts, *operands[ahead:]],
        cond_jaxpr=rewritten(context, eqn.params["cond_jaxpr"], test),
        body_jaxpr=rewritten(context, eqn.params["body_jaxpr"], body),
        body_nconsts=eqn.params["body_nconsts"] + len(casts),
    )
