"""A program to tune: its plan, its groups, its result, and what a choice of groups does to it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import eval_jaxpr

from jaxamp.compiled.targets import TARGETS
from jaxamp.errors import TuningError
from jaxamp.inspect.blocks import Block, blocks_of
from jaxamp.inspect.operation import Operation
from jaxamp.inspect.walk import Walk
from jaxamp.plan import Plan, plan_program
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.rewrite import run_plan
from jaxamp.run.amp import inspected
from jaxamp.run.emit import plan_call
from jaxamp.tools.tune.sensitivity import is_float, norm, relative_error, sensitivities
from jaxamp.tools.tune.tuning import Group, lowered_groups
from jaxamp.trace.arguments import Static
from jaxamp.trace.target import Statics

Metric = Callable[[Any, Any], Any]

_NONE = Statics()
_TARGET = TARGETS["h200"]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A program to tune: its plan, flat arguments, and what it returns besides arrays.

    Without a metric its error is the relative one.
    """

    plan: Plan
    args: Sequence[Any]
    outputs: Static
    metric: Metric | None

    @classmethod
    def of(
        cls,
        fn: Any,
        policy: Any,
        args: Sequence[Any],
        metric: Metric | None,
        statics: Statics = _NONE,
    ) -> Problem:
        """Return the problem of a function and its arguments."""
        amped = inspected(fn, policy, statics=statics)
        with amped.prepared(tuple(args), {}, abstract=False) as call:
            plan, outputs = plan_call(call.signature(), call.arrays, amped.settings)
            return cls(plan, call.arrays, outputs, metric)

    @functools.cached_property
    def block(self) -> Block:
        """The program with its plan."""
        return blocks_of(self.plan)

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups that the policy lowers."""
        return lowered_groups(self.block)

    @functools.cached_property
    def reference(self) -> list[Any]:
        """The result in the original precision."""
        closed = self.plan.jaxpr
        results = jax.jit(lambda *a: eval_jaxpr(closed.jaxpr, closed.consts, *a))(*self.args)
        floats = [r for r in results if is_float(r)]
        if not all(np.isfinite(np.asarray(r, np.float64)).all() for r in floats):
            raise TuningError(
                "The result is not finite in its original precision, so no error can be measured. "
                "jaxamp.training.explain_nonfinite says which operation is to blame."
            )
        if not floats and self.metric is None:
            raise TuningError("The function returns no floating-point array to compare.")
        return results

    def matrix(self) -> np.ndarray:
        """Return the matrix of ``sensitivities``."""
        floats = list(filter(is_float, self.reference))
        return sensitivities(self.block, self.groups, self.args, floats)

    def policy(self, low: np.ndarray, labels: Sequence[str] = ()) -> PrecisionPolicy:
        """Return the policy in which only some of the groups are low."""
        labels = labels or [""] * len(self.groups)
        triples = zip(self.groups, low, labels, strict=True)
        rules = [group.rule("f32", label) for group, is_low, label in triples if not is_low]
        return self.plan.policy.with_rules(*rules)

    def plan_for(self, low: np.ndarray) -> Plan:
        """Return the plan in which only some of the groups are low."""
        return plan_program(self.plan.jaxpr, self.policy(low))

    def cost(self, low: np.ndarray) -> float:
        """Return the cost if only some of the groups are low: the modelled seconds.

        Each operation is a kernel of its own, at the published rates.
        """
        return sum(op.runs * _seconds(op) for op in Walk(self.plan_for(low)).operations)

    def error(self, low: np.ndarray) -> float:
        """Measure the error if only some of the groups are low, by running it."""
        plan = self.plan_for(low)
        results = jax.jit(lambda *args: run_plan(plan.jaxpr, plan, *args))(*self.args)
        if self.metric is not None:
            value = float(
                self.metric(self.outputs.join(results), self.outputs.join(self.reference))
            )
            return value if np.isfinite(value) else float("inf")
        pairs = zip(results, self.reference, strict=True)
        floats = [(r, e) for r, e in pairs if is_float(e)]
        return relative_error([r for r, _ in floats], [e for _, e in floats])

    def gains(self) -> np.ndarray:
        """Return the cost that lowering each group saves, when all others are low."""
        every = np.ones(len(self.groups), bool)
        base = self.cost(every)
        ones = np.eye(len(self.groups), dtype=bool)
        return np.array([max(self.cost(every & ~one) - base, 0.0) for one in ones])

    def fingerprint(self) -> str:
        """Hash the program, its arguments and the policy."""
        texts = [str(self.plan.jaxpr.jaxpr), self.plan.policy.to_json(), *map(str, self.groups)]
        texts += [f"{norm(arg) if is_float(arg) else arg!s}" for arg in self.args]
        return hashlib.sha256("".join(texts).encode()).hexdigest()


def _seconds(op: Operation) -> float:
    multiplying = op.each.flops / _TARGET.rate(op.arithmetic) if op.contraction else 0.0
    return max(multiplying, op.each.bytes / _TARGET.bandwidth)
