"""Emit branches and loops: bodies rewritten, the rest of the equation as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxamp.core import jax_compat
from jaxamp.jaxprs.interpret import bind_nested
from jaxamp.jaxprs.nested import loop
from jaxamp.rewrite.interpreter import rewritten_bodies
from jaxamp.rewrite.registry import RuleContext, rewrites


@rewrites("cond")
def cond(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Rewrite all branches; their plans agree on the dtypes of the results."""
    return bind_nested(context.eqn, operands, rewritten_bodies(context))


@rewrites("scan")
def scan(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Rewrite the body; a carry has one dtype throughout, slices and stacks have their own.

    Other forms of invariants become invariants of the new loop.
    """
    forms = [*context.invariant_casts, *context.wide_invariants]
    layout = jax_compat.scan_with_invariants(context.eqn, len(forms))
    return bind_nested(context.eqn, [*forms, *operands], rewritten_bodies(context), **layout)


@rewrites("while")
def while_loop(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Rewrite the body; the carry keeps its dtype, and the test is left in f32."""
    forms = [*context.invariant_casts, *context.wide_invariants]
    wired = loop(context.eqn)
    tested, fixed, carries, _ = wired.parts(operands)
    given, count = [*tested, *forms, *fixed, *carries], wired.invariants + len(forms)
    return bind_nested(context.eqn, given, rewritten_bodies(context), body_nconsts=count)
