"""Warn of a policy, or a part of one, that decides nothing in a program."""

from __future__ import annotations

import itertools
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence, Set

from jax.extend.core import Jaxpr

from jaxamp.core import features, jax_compat
from jaxamp.core.formats import Precision, is_narrow
from jaxamp.core.taxonomy import OpKind
from jaxamp.errors import IdlePolicyWarning, likely
from jaxamp.jaxprs.nested import is_region, nested
from jaxamp.plan import Plan
from jaxamp.plan.decision import Decision
from jaxamp.policy.rules import Rule

_FEW = 12  # names that are listed
_WIDE = Precision.F32, Precision.F64


def warn_of_idle_parts(plan: Plan, name: str) -> None:
    """Warn once of all rules, scalings and precisions of a policy that a program does not use."""
    of_features = (
        words for work in features.works() if work.idle for words in work.idle(plan, name)
    )
    idle = [*_rules(plan, name), *of_features, *_lowering(plan, name)]
    if idle:
        warnings.warn("\n".join(idle), IdlePolicyWarning, stacklevel=jax_compat.user_level())


def _rules(plan: Plan, name: str) -> Iterator[str]:
    for rule in plan.unmatched_rules:
        yield (
            f"The rule `{rule}` has no effect in {name}: no operation matches it, or an earlier "
            f"rule matches the same ones.{_near(rule, plan)}"
        )


def _near(rule: Rule, plan: Plan) -> str:
    """Return what a rule may have meant."""
    if rule.function is not None and rule.scope is None:
        names = sorted(set(_functions(plan.jaxpr.jaxpr)))
        return _some("Functions", rule.function.rpartition(".")[2], names)
    if rule.scope is None:
        return " jaxamp.explain(fn)(*args) shows the operations of a program."
    scopes = {part for d in plan.decisions() for part in d.scope.split("/") if part}
    if not scopes:
        return " The program has no scopes: name functions, function=..., or use jax.named_scope."
    return _some("Scopes", rule.scope, sorted(scopes)) + _shared(rule.scope, scopes)


def _shared(wanted: str, scopes: Set[str]) -> str:
    """Return the cure, where a rule names one of several modules that have one scope.

    JAX keeps the code of every call around an equation, and the place in it, but no variables:
    which item of a list a Python loop is at is known by the parameters that are read.
    """
    parts = re.split(r"[./]", wanted)
    for owner, index in itertools.pairwise(parts):
        if index.isdecimal() and owner in scopes:
            return (
                f" Modules that a Python loop goes through share one scope, {owner!r}: name them "
                f"where they are called, `with jax.named_scope(f'{owner}{{i}}'):`, for a rule with "
                f"scope='{owner}{index}'; or match all of them, scope={owner!r}."
            )
    return ""


def _some(what: str, word: str, names: Sequence[str]) -> str:
    """Return a sentence with the likely one of a program's names, and the first few."""
    rest = ", …" if len(names) > _FEW else ""
    return f" {likely(word, names)}{what} of the program: {', '.join(names[:_FEW])}{rest}."


def _functions(jaxpr: Jaxpr) -> Iterator[str]:
    """Yield what `function` of a rule may name: functions and classes on the call stacks."""
    for eqn in jaxpr.eqns:
        user, library = jax_compat.functions(eqn.source_info.traceback)
        for name in user:
            yield from (part for part in name.split(".") if part.isidentifier())
        yield from (name for name in library if name[:1] != "_")
        for inner in nested(eqn):
            yield from _functions(inner.jaxpr)


def _lowering(plan: Plan, name: str) -> Iterator[str]:
    if plan.policy.cast_for(OpKind.COMPUTE).out_dtype in _WIDE:
        return
    decisions = list(plan.decisions())
    products = [d for d in decisions if d.kind is OpKind.COMPUTE]
    dots = [d for d in products if d.operand]  # the others are narrow as written, or integers
    if dots and all(d.operand in _WIDE for d in dots):
        yield (
            f"{plan.policy} changes no matrix product of {name}: all stay in float32 "
            f"({commonest(dots)}). jaxamp.explain(fn)(*args) names the reason on each line."
        )
    if not (products or plan.policy.is_scaled or any(_is_lowered(d) for d in decisions)):
        yield (
            f"{plan.policy} changes nothing in {name}: it has no matrix product. Wrap the function "
            "that multiplies matrices: the loss, the model or the training step."
        )


def _is_lowered(decision: Decision) -> bool:
    """Return whether an equation is narrow, or has been rewritten by an ``amp`` of its own."""
    return is_narrow(decision.output) or is_region(decision.eqn)


def commonest(dots: Sequence[Decision]) -> str:
    """Return the commonest reason of some products, and how many have it."""
    reason, count = Counter(d.reason for d in dots).most_common(1)[0]
    return f"{count} of {len(dots)} products: {reason}"
