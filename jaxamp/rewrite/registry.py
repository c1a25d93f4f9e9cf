"""Register rewrite rules, one for each primitive that needs one, and define their context.

A rule looks like a lowering rule of JAX: a context, then plain operands, and it returns results.

See: https://docs.jax.dev/en/latest/jax-primitives.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, TypeAlias

from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxamp.core import features, jax_compat
from jaxamp.plan import Decision, Fusion, JaxprPlan
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.rewrite.emitter import Emitter, emitter_of


@dataclass(frozen=True, slots=True)
class RewriteContext:
    """State that rules share during one rewrite."""

    # Policy, also for derivative rules, which are planned when JAX traces them.
    policy: PrecisionPolicy
    repeated: frozenset[Fusion] = frozenset()  # groups of equations that are emitted more than once
    # Jaxprs already rewritten, by the plan that they follow (kept alive by the key).
    rewritten: dict[JaxprPlan, ClosedJaxpr] = field(default_factory=dict)
    # Functions that emit a group of equations, by the group and the types of its inputs.
    fused: dict[tuple[Fusion, tuple[Any, ...]], Callable[..., Any]] = field(default_factory=dict)
    emitter: Emitter = field(init=False)  # emits what plans under the policy hint at

    def __post_init__(self) -> None:
        object.__setattr__(self, "emitter", emitter_of(self.policy))

    def forget(self) -> None:
        """Drop what was made, which refers back to this: a cycle for the collector."""
        self.rewritten.clear()
        self.fused.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleContext:
    """One equation to emit, and all that its rule knows of it beside the operands."""

    rewrite: RewriteContext  # state shared by the whole rewrite
    eqn: JaxprEqn
    decision: Decision
    # For a contraction, per index of an operand that is the rounding of a boundary value: that
    # value, f32[...]. The contraction is differentiated with respect to it.
    originals: Mapping[int, Any] = field(default_factory=dict)
    rounding: Any = None  # for an equation that moves a value and its rounding alike: the rounding
    # For a loop, one array for each of `EquationPlan.invariant_forms`.
    invariant_forms: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class RoundedResults:
    """Results of an equation, and the same in a narrow format, which readers of that share."""

    results: Sequence[Any]
    roundings: Sequence[Any] = ()


RewriteRule: TypeAlias = Callable[Concatenate[RuleContext, ...], Sequence[Any] | RoundedResults]
"""A function that emits one equation: ``rule(context, *operands)`` returns its results.

Operands are those of the equation, cast as the decision says. Results are cast by the caller, so
that a rule looks only after parameters that carry a dtype or a jaxpr.
"""

_RULES: dict[str, RewriteRule] = {}


def rewrites(*primitives: str) -> Callable[[RewriteRule], RewriteRule]:
    """Register a rule for primitives, given by name; refuse a second rule for one."""

    def register(rule: RewriteRule) -> RewriteRule:
        for name in primitives:
            if name in _RULES:
                raise ValueError(f"{name!r} has a rewrite rule already: {_RULES[name]}")
            _RULES[name] = rule
        return rule

    return register


def rule_for(decision: Decision) -> RewriteRule:
    """Return the rule that emits an equation: of its form, or else of its primitive.

    Most primitives have no dtype in their parameters and need none.
    """
    if decision.plan.form is not None:
        forms = (work.forms.get(type(decision.plan.form)) for work in features.works())
        return next(filter(None, forms))
    name = decision.primitive
    if name in _RULES:
        return _RULES[name]
    rules = (work.rules[name] for work in features.works() if name in work.rules)
    return next(rules, lambda context, *operands: jax_compat.bind(context.eqn, operands))
