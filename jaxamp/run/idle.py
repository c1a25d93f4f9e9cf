"""Warnings about a policy, or a part of one, that came to nothing in a program."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator

from jaxamp.core.formats import Precision
from jaxamp.core.taxonomy import OpKind
from jaxamp.errors import IdlePolicyWarning, accepted
from jaxamp.plan import Plan
from jaxamp.plan.decision import Decision
from jaxamp.policy.rules import Rule

_WIDE = Precision.F32, Precision.F64


def warn_of_idle_parts(plan: Plan, name: str) -> None:
    """Warn once of all that a policy asks for and that a program has no place for.

    Args:
      plan: the plan of the program under the policy.
      name: what the program is called.
    """
    idle = [*_rules(plan), *_scaling(plan), *_lowering(plan)]
    if idle:
        text = "\n".join(f"Nothing came of {line}" for line in idle)
        warnings.warn(text.replace(" in it:", f" in {name}:"), IdlePolicyWarning, stacklevel=3)


def _rules(plan: Plan) -> Iterator[str]:
    for rule in plan.unmatched_rules:
        yield f"the rule `{rule}` in it: it matched no operation, or others before it did." + _near(
            rule, plan
        )


def _near(rule: Rule, plan: Plan) -> str:
    """Return what a rule may have meant."""
    if rule.scope is None:
        return " jaxamp.explain(fn)(*args) shows the operations of a program."
    scopes = {part for d in plan.decisions() for part in d.scope.split("/") if part}
    if not scopes:
        return " The program has no scopes: name functions, function=..., or use jax.named_scope."
    return f" Scopes of the program: {accepted(rule.scope, sorted(scopes)[:20])}"


def _scaling(plan: Plan) -> Iterator[str]:
    if not plan.policy.is_scaled:
        return
    dots = [d for d in plan.decisions() if d.kind is OpKind.COMPUTE]
    if any(d.scaled for d in dots):
        return
    why = "there is no product" if not dots else f"no product is scaled ({_commonest(dots)})"
    yield (
        f"{plan.policy} in it: {why}. It runs as mixed precision does. Scaling(...) of the policy "
        "says which products are scaled; jaxamp.report(fn)(*args) shows each with its reason."
    )


def _lowering(plan: Plan) -> Iterator[str]:
    if plan.policy.cast_for(OpKind.COMPUTE).out_dtype in _WIDE:
        return
    dots = [d for d in plan.decisions() if d.kind is OpKind.COMPUTE and d.operand is not None]
    if dots and all(d.operand in _WIDE for d in dots):
        yield (
            f"{plan.policy} in it: every product stays wide ({_commonest(dots)}). "
            "jaxamp.explain(fn)(*args) shows what keeps each: an explicit precision, a rule or "
            "keep_precision around it."
        )


def _commonest(dots: list[Decision]) -> str:
    reason, count = Counter(d.reason for d in dots).most_common(1)[0]
    return f"{count} × {reason}"
