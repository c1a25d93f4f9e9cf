"""Branches and loops: bodies rewritten, the rest of the equation as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.jaxprs.interpret import bind_nested
from jaxamp.jaxprs.nested import called, loop, nested
from jaxamp.plan import Decision
from jaxamp.rewrite.interpreter import rewritten
from jaxamp.rewrite.registry import Context, parted, rewrites


@rewrites("cond")
def cond(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """All branches give the same dtypes: their plans agree on the results."""
    pairs = zip(nested(eqn), decision.inner, strict=True)
    return bind_nested(eqn, operands, [rewritten(context, *pair) for pair in pairs])


@rewrites("scan")
def scan(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """The carry has one dtype on its way in, round and out; slices and stacks have their own.

    Casts of what is the same in every turn become invariants too.
    """
    body = rewritten(context, called(eqn), decision.inner[0])
    operands, casts = parted(eqn, operands)
    layout = jax_compat.scan_with_invariants(eqn, len(casts))
    return bind_nested(eqn, [*casts, *operands], [body], **layout)


@rewrites("while")
def while_loop(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """The carry keeps its dtype, and the test is left in f32."""
    bodies = [rewritten(context, *p) for p in zip(nested(eqn), decision.inner, strict=True)]
    operands, casts = parted(eqn, operands)
    wired = loop(eqn)
    tested, fixed, carries, _ = wired.parts(operands)
    given, count = [*tested, *casts, *fixed, *carries], wired.invariants + len(casts)
    return bind_nested(eqn, given, bodies, body_nconsts=count)
