"""The interpreter of ``probe``: runs a program as planned beside the original one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision, is_narrow
from jaxamp.core.semantics import Linear
from jaxamp.core.taxonomy import Trait, op_of
from jaxamp.inspect.blocks import Block, Site, blocks_of
from jaxamp.numerics.nested_interpreter import Interpreter, Value, is_inexact, run_sites
from jaxamp.numerics.statistics import Ledger, joined, measured
from jaxamp.plan import Decision, OperandRead, Plan
from jaxamp.rewrite.environment import Environment
from jaxamp.rewrite.interpreter import emit
from jaxamp.rewrite.registry import RewriteContext, RuleContext

_WHOLE = frozenset({Trait.SAME, Trait.PLACEMENT, Trait.SHAPE})
_FOREIGN = frozenset({Trait.CALLBACK, Trait.STATE, Trait.TOKEN})


def run_beside(plan: Plan, *args: Any) -> tuple[list[Any], Ledger]:
    """Run a program as planned beside the original; return its results and the table."""
    block = blocks_of(plan)
    ledger = Ledger.empty(sum(1 for _ in block.walk()))
    shadowing = Shadowing(RewriteContext(plan.policy, plan.repeated), block, ledger)
    outs, ledger = shadowing.of(list(map(Value, args)))
    return [value.low for value in outs], ledger


class Shadowing(Interpreter):
    """The run of a block in the planned precision and, where that is lower, the original.

    Its state is the table of statistics.
    """

    def __init__(self, context: RewriteContext, block: Block, ledger: Ledger) -> None:
        self.context, self.block, self.ledger = context, block, ledger
        self.env = Environment()
        self.rounded: dict[Any, Any] = {}
        self.shadows: dict[Any, Any] = {}
        self.rows: list[Ledger] = []

    def run(
        self, block: Block, values: Sequence[Value], state: Ledger
    ) -> tuple[list[Value], Ledger]:
        """Run a block inside of this one on its inputs."""
        return Shadowing(self.context, block, state).of(values)

    def of(self, values: Sequence[Value]) -> tuple[list[Value], Ledger]:
        """Return the results for some inputs, and the table."""
        self._enter(self.block.jaxpr.constvars, list(map(Value, self.block.consts)))
        self._enter(self.block.jaxpr.invars, values)
        run_sites(self.block, self._equation)
        atoms, wanted = self.block.jaxpr.outvars, self.block.plan.outputs
        lows = self.env.read_results(atoms, wanted)
        results = list(map(self._value, atoms, lows, wanted))
        return results, self.ledger.enter(self.block.numbers(), self.rows)

    def _enter(self, variables: Sequence[Any], values: Sequence[Value]) -> None:
        """Bind inputs as they arrive."""
        self.env.enter(variables, [value.low for value in values])
        for var, value in zip(variables, values, strict=True):
            self._know(var, value)

    def _equation(self, site: Site) -> None:
        operands = list(map(self._operand, site.eqn.invars, site.decision.plan.reads))
        if site.inner:
            self._nest(site, operands)
        else:
            self._compute(site.eqn, site.decision, operands)

    def _operand(self, atom: Any, read: OperandRead) -> Any:
        """Read an operand; its rounding is kept by a barrier, as that of narrow results is."""
        value = self.env.read_operand(atom, read)
        if isinstance(atom, Literal) or not is_narrow(read.precision):
            return value
        if self.env.read(atom, None).dtype == value.dtype:
            return value
        key = atom, read.precision, read.copy
        if key not in self.rounded:
            self.rounded[key] = lax.optimization_barrier(value)
        return self.rounded[key]

    def _nest(self, site: Site, operands: Sequence[Any]) -> None:
        eqn, decision = site.eqn, site.decision
        values = list(map(self._value, eqn.invars, operands, decision.operands))
        outs, self.ledger = self.enter(site, values, self.ledger)
        self._write(eqn, decision, [value.low for value in outs])
        for var, value in zip(eqn.outvars, outs, strict=True):
            self._know(var, value)

    def _compute(self, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]) -> None:
        context = RuleContext(rewrite=self.context, eqn=eqn, decision=decision)
        self._write(eqn, decision, emit(context, operands).results)
        rows = []
        for var, shadow in zip(eqn.outvars, self._shadows(eqn, decision), strict=True):
            if not isinstance(var, jax_compat.DropVar) and is_inexact(var.aval):
                rows.append(self._measure(eqn, operands, var, shadow))
            elif shadow is not None:
                self.shadows[var] = shadow
        self.rows.append(joined(rows) if rows else Ledger.empty())

    def _measure(self, eqn: JaxprEqn, operands: Sequence[Any], var: Any, shadow: Any) -> Ledger:
        """Measure a float result."""
        low = self.env.read(var, None)
        place = eqn.outvars.index(var)  # a barrier hands on each operand as a result of its own
        if _hands_on(eqn) and low.dtype == operands[place].dtype:
            self._know(var, Value(low, shadow))
            return Ledger.empty()
        # Stored once, or each statistic would compute it again; and measured at once, or it would
        # have to be kept.
        low, shadow = lax.optimization_barrier((low, shadow))
        row = measured(low, shadow, Precision.of_dtype(low.dtype))
        low, shadow, row = lax.optimization_barrier((low, shadow, row))
        self.env.enter([var], [low])
        self._know(var, Value(low, shadow))
        return row

    def _write(self, eqn: JaxprEqn, decision: Decision, results: Sequence[Any]) -> None:
        """Store results, narrow ones behind a barrier: XLA must not widen what is measured."""
        pairs = zip(decision.outputs, decision.plan.hints.barriers, strict=True)
        barriers = [is_narrow(p) or has_barrier for p, has_barrier in pairs]
        self.env.write(eqn.outvars, results, decision.outputs, barriers)

    def _shadows(self, eqn: JaxprEqn, decision: Decision) -> list[Any]:
        """Compute the results in the original precision; ``None`` where they are the same."""
        narrows = decision.is_narrow or decision.sent
        shadows = list(map(self._shadow, eqn.invars))
        runs_once = bool(eqn.effects) or op_of(eqn.primitive).trait in _FOREIGN
        if runs_once or not (narrows or any(shadow is not None for shadow in shadows)):
            return [None] * len(eqn.outvars)
        pairs = zip(eqn.invars, shadows, strict=True)
        return jax_compat.bind(eqn, [self.env.read(a, None) if s is None else s for a, s in pairs])

    def _value(self, atom: Any, low: Any, precision: Precision | None) -> Value:
        """Return a value as it leaves for another block."""
        shadow = self._shadow(atom)
        if shadow is None and is_narrow(precision) and not isinstance(atom, Literal):
            shadow = self.env.read(atom, None)
        return Value(low, shadow)

    def _shadow(self, atom: Any) -> Any:
        return None if isinstance(atom, Literal) else self.shadows.get(atom)

    def _know(self, var: Any, value: Value) -> None:
        if value.shadow is not None:
            self.shadows[var] = value.shadow


def _hands_on(eqn: JaxprEqn) -> bool:
    """Return whether results are the operand's numbers, so that what is known of it stays true."""
    op = op_of(eqn.primitive)
    is_choice = op.trait is Trait.EXACT and op.semantics.linear is Linear.ALL
    return op.trait in _WHOLE or (is_choice and len(eqn.invars) == 1)  # a negative, say
