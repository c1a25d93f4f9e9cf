"""The one registry of rewrite rules, and what every rule is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive

from jaxamp.core import jax_compat
from jaxamp.plan import Decision, Fusion, JaxprPlan
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.policy.techniques import Technique
from jaxamp.rewrite.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Context:
    """What rules share during one rewrite.

    Attributes:
      policy: for the jaxprs that only differentiation brings to light.
      steer: for these, too: what tells how XLA is steered.
      repeated: the groups of equations that are emitted more than once.
      recorder: what counts the casts, for a report; ``None`` for a program that is to run.
      rewritten: jaxprs already rewritten, by the plan that they follow (kept alive by the key).
      fused: what emits a group of equations, by the group and the types of its operands.
    """

    policy: PrecisionPolicy
    steer: Callable[..., Any]
    repeated: frozenset[Fusion] = frozenset()
    recorder: Recorder | None = None
    rewritten: dict[JaxprPlan, ClosedJaxpr] = field(default_factory=dict)
    fused: dict[tuple[Fusion, tuple[Any, ...]], Callable[..., Any]] = field(default_factory=dict)

    def steers(self, technique: Technique) -> bool:
        """Return whether a technique of steering XLA is on."""
        return technique in self.policy.xla

    def forget(self) -> None:
        """Lets go of what was made, which refers back to this: a cycle for the collector."""
        self.rewritten.clear()
        self.fused.clear()


class RewriteRule(Protocol):
    """Emits one equation.

    Operands come cast as the decision says, and after them those that it has read a second time;
    results are cast by the caller, so that a rule looks only after parameters that carry a dtype or
    a jaxpr. After the results may come roundings of them, in order, which are then at hand.
    """

    def __call__(
        self, context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
    ) -> Sequence[Any]:
        """Emits the equation and gives its results."""
        ...


def parted(eqn: JaxprEqn, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The operands of an equation, and those that it has read a second time."""
    return operands[: len(eqn.invars)], operands[len(eqn.invars) :]


_RULES: dict[str, RewriteRule] = {}


def rewrites(*primitives: str) -> Callable[[RewriteRule], RewriteRule]:
    """Registers a rule for primitives, given by name; a second rule for one is refused."""

    def register(rule: RewriteRule) -> RewriteRule:
        for name in primitives:
            if name in _RULES:
                raise ValueError(f"{name!r} has a rewrite rule already: {_RULES[name]}")
            _RULES[name] = rule
        return rule

    return register


def rule_for(primitive: Primitive) -> RewriteRule:
    """The rule of a primitive; most have no dtype in their parameters and need none."""
    return _RULES.get(primitive.name, _unchanged_parameters)


def _unchanged_parameters(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    return jax_compat.bind(eqn, operands)
