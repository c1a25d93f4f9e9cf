"""The interpreter of ``probe``: runs a program as planned beside the original one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision, is_narrow
from jaxamp.core.taxonomy import Trait, lookup
from jaxamp.inspect.blocks import Block, Site
from jaxamp.numerics.finite_marks import GIVEN, Slot, Tape, finite, part, worse
from jaxamp.numerics.nested_interpreter import Interpreter, Value, literal, run_live
from jaxamp.numerics.statistics import Ledger, Row, joined, measured, no_row
from jaxamp.plan import Decision, OperandRead
from jaxamp.rewrite.environment import Environment
from jaxamp.rewrite.interpreter import emit, interpret
from jaxamp.rewrite.registry import RewriteContext, RuleContext
from jaxamp.xla.primitives.rounding_barrier import rounding_barrier

# Hand their operand on number by number, so that what is known of it stays true.
_ELEMENT_PRESERVING = frozenset(
    ("broadcast_in_dim", "copy", "name", "neg", "reshape", "rev", "squeeze", "stop_gradient")
) | {"transpose", "rounding_barrier", "optimization_barrier", "sharding_constraint"}
_FOREIGN = frozenset({Trait.CALLBACK, Trait.STATE, Trait.TOKEN})


class Watch(NamedTuple):
    """One run of one operation, whose operands are wanted.

    Attributes:
      number: the operation's.
      loops: the iteration of each loop around.
      take: what is called with the operands, on the host.
    """

    number: int
    loops: tuple[int, ...]
    take: Any


class _State(NamedTuple):
    """The state that passes from block to block.

    Attributes:
      ledger: the table of statistics.
      time: when a loop or branch starts; ``None`` in a call, which belongs to its caller's segment.
      tape: the marks of that segment; ``None`` in loops and branches, which have their own.
    """

    ledger: Ledger
    time: Any = None
    tape: Tape | None = None


class Shadowing(Interpreter):
    """An interpreter of blocks in the planned precision and, where that is lower, the original.

    Args:
      context: as for the rewrite; ``None`` where nothing is planned.
      depth: how deep loops are nested.
      shadows: whether to compute what results would be, and statistics.
      marks: whether to compute marks.
      watch: a run whose operands are wanted.
    """

    def __init__(
        self,
        context: RewriteContext | None,
        depth: int,
        *,
        shadows: bool = False,
        marks: bool = False,
        watch: Watch | None = None,
    ) -> None:
        self.context, self.depth = context, depth
        self.shadows, self.marks, self.watch = shadows, marks, watch

    def start(self, block: Block, args: Sequence[Any], sites: int) -> tuple[list[Value], Ledger]:
        """Run a whole program."""
        ledger = Ledger.empty(sites if self.shadows else 0)
        tape = Tape(jnp.int32(0), (), self.depth)
        values = [Value(arg, mark=self.given(arg, tape)) for arg in args]
        outs, state = self.run(block, values, _State(ledger, tape=tape), ())
        if self.marks:
            slots = [value.mark or Slot(0) for value in outs]
            outs = [v._replace(mark=m) for v, m in zip(outs, tape.rows(slots), strict=True)]
        return outs, state.ledger

    def run(
        self, block: Block, values: Sequence[Value], state: Any, loops: tuple[Any, ...]
    ) -> tuple[list[Value], Any]:
        """Run a block on its inputs."""
        tape = state.tape or Tape(state.time, loops, self.depth)
        if state.tape is None:
            values = _import_marks(tape, values)
        run = _Run(self, block, state.ledger, tape)
        consts = [Value(const, mark=self.given(const, tape)) for const in block.consts]
        run.enter(block.jaxpr.constvars, consts)
        run.enter(block.jaxpr.invars, values)
        run_live(block, run.equation)
        outs, ledger = run.results()
        if state.tape is None:
            return _export_marks(tape, outs), _State(ledger, tape.time)
        return outs, _State(ledger, tape=tape)

    def test(self, body: ClosedJaxpr, plan: Any, values: Sequence[Value]) -> Any:
        """Return what the program itself computes."""
        lows = [value.low for value in values]
        if plan is None or self.context is None:
            return eval_jaxpr(body.jaxpr, body.consts, *lows)[0]
        return interpret(self.context, body.jaxpr, plan, body.consts, lows)[0]

    def match_shadow(self, value: Value, aval: Any, shadowed: bool) -> Value:
        """Add a shadow to floats alone: integers and booleans are the program's own."""
        if not (shadowed and self.shadows and _is_float(aval)):
            return value._replace(shadow=None)
        shadow = value.low if value.shadow is None else value.shadow
        return value._replace(shadow=lax.convert_element_type(shadow, aval.dtype))

    def sliced(self, value: Value) -> Value:
        """Mark a slice anew: it may be finite where the whole is not."""
        if value.mark is None:
            return value
        return value._replace(mark=part(value.mark, value.low))

    def stacked(self, mark: Any, slice_mark: Any) -> Any:
        """Return the worst mark of the slices."""
        return None if mark is None else worse(mark, slice_mark)

    def blank(self, aval: Any) -> Any:
        """Return the mark of what is finite."""
        return finite(self.depth) if self.marks and _is_inexact(aval) else None

    def given(self, array: Any, tape: Tape) -> Slot | None:
        """Return the mark of an input or constant."""
        if not (self.marks and _is_inexact(jax.typeof(array))):
            return None
        if isinstance(array, np.ndarray) and np.isfinite(array).all():
            return Slot(0)
        return tape.add(array, (), GIVEN)


class _Run:
    """The run of one block."""

    def __init__(self, owner: Shadowing, block: Block, ledger: Ledger, tape: Tape) -> None:
        self.owner, self.block, self.ledger, self.tape = owner, block, ledger, tape
        self.env = Environment()
        self.rounded: dict[Any, Any] = {}
        self.shadows: dict[Any, Any] = {}
        self.marks: dict[Any, Slot] = {}
        self.rows: list[Row] = []

    def enter(self, variables: Sequence[Any], values: Sequence[Value]) -> None:
        """Bind inputs as they arrive."""
        self.env.enter(variables, [value.low for value in values])
        for var, value in zip(variables, values, strict=True):
            self._know(var, value)

    def equation(self, position: int) -> None:
        """Run one equation."""
        eqn, decision = self.block.jaxpr.eqns[position], self.block.decision(position)
        site = self.block.sites[position]
        if decision is None:
            operands = [self.env.read(atom, None) for atom in eqn.invars]
        else:
            operands = list(map(self._operand, eqn.invars, decision.reads))
        if site is None:
            self._nest(position, eqn, decision, operands)
        else:
            self._compute(site, eqn, decision, operands)
        self.tape.tick()

    def results(self) -> tuple[list[Value], Ledger]:
        """Return the results of the block, and the table."""
        atoms, plan = self.block.jaxpr.outvars, self.block.plan
        wanted = plan.outputs if plan else [None] * len(atoms)
        lows = self.env.read_results(atoms, wanted)
        values = []
        for atom, low, precision in zip(atoms, lows, wanted, strict=True):
            value = self._value(atom, low, precision)
            values.append(value)
        return values, self.ledger.enter(self.block.numbers(), self.rows)

    def _operand(self, atom: Any, read: OperandRead) -> Any:
        """Read an operand; its rounding is kept by a barrier, as that of narrow results is."""
        value = self.env.read_operand(atom, read)
        if literal(atom) is not None or not is_narrow(read.precision):
            return value
        if self.env.read(atom, None).dtype == value.dtype:
            return value
        key = atom, read.precision, read.copy
        if key not in self.rounded:
            self.rounded[key] = rounding_barrier(value)
        return self.rounded[key]

    def _nest(
        self, position: int, eqn: JaxprEqn, decision: Decision | None, operands: Sequence[Any]
    ) -> None:
        precisions = decision.operands if decision else [None] * len(operands)
        triples = zip(eqn.invars, operands, precisions, strict=True)
        values = [self._value(*triple) for triple in triples]
        outs = self._entered(position, values)
        self._write(eqn, decision, [value.low for value in outs])
        for var, value in zip(eqn.outvars, outs, strict=True):
            self._know(var, value)

    def _entered(self, position: int, values: Sequence[Value]) -> Sequence[Value]:
        """Return the results of an equation that holds blocks."""
        tape, loops = self.tape, self.tape.around
        enter = functools.partial(self.owner.enter, self.block, position)
        if _is_call(self.block.jaxpr.eqns[position]):
            outs, state = enter(values, _State(self.ledger, tape=tape), loops)
        else:
            values = _export_marks(tape, values)
            outs, state = enter(values, _State(self.ledger, tape.time), loops)
            tape.resume(state.time)
            outs = _import_marks(tape, outs)
        self.ledger = state.ledger
        return outs

    def _compute(
        self, site: Site, eqn: JaxprEqn, decision: Decision | None, operands: Sequence[Any]
    ) -> None:
        if self.owner.watch and self.owner.watch.number == site.number:
            stored = [self.env.read(atom, None) for atom in eqn.invars]
            _report(self.owner.watch, self.tape.around, stored)
        if decision is None or self.owner.context is None:
            results = jax_compat.bind(eqn, operands)
        else:
            context = RuleContext(rewrite=self.owner.context, eqn=eqn, decision=decision)
            results = emit(context, operands).results
        self._write(eqn, decision, results)
        if self.owner.marks:
            self._mark_cells(site, eqn)
        shadows = self._shadows(eqn, decision)
        rows = []
        for var, shadow in zip(eqn.outvars, shadows, strict=True):
            if not isinstance(var, jax_compat.DropVar) and _is_inexact(var.aval):
                rows.append(self._judge(site, eqn, operands, var, shadow))
            elif shadow is not None:
                self.shadows[var] = shadow
        if self.owner.shadows:
            self.rows.append(joined(rows) if rows else no_row())

    def _judge(
        self, site: Site, eqn: JaxprEqn, operands: Sequence[Any], var: Any, shadow: Any
    ) -> Row:
        """Mark a float result, and measure it."""
        low = self.env.read(var, None)
        place = eqn.outvars.index(var)  # a barrier hands on each operand as a result of its own
        if eqn.primitive.name in _ELEMENT_PRESERVING and low.dtype == operands[place].dtype:
            self._know(var, Value(low, shadow, self._mark(eqn.invars[place])))
            return no_row()
        if self.owner.shadows:
            # Stored once, or each statistic would compute it again; and measured at once, or it
            # would have to be kept.
            low, shadow = lax.optimization_barrier((low, shadow))
            row = measured(low, shadow, Precision.of_dtype(low.dtype))
            low, shadow, row = lax.optimization_barrier((low, shadow, row))
            self.env.enter([var], [low])
            self._know(var, Value(low, shadow))
            return row
        if self.owner.marks:
            pairs = zip(eqn.invars, operands, strict=True)
            taken = [mark for pair in pairs if (mark := self._taken(site, *pair)) is not None]
            self._know(var, Value(low, None, self.tape.add(low, taken, site.number)))
        return no_row()

    def _mark_cells(self, site: Site, eqn: JaxprEqn) -> None:
        """Mark each mutable array that an operation makes or writes by what it then holds."""
        written = eqn.invars if jax_compat.writes_to_ref(eqn) else ()
        variables = [atom for atom in (*written, *eqn.outvars) if _is_cell(atom)]
        if variables:
            taken = [mark for atom in eqn.invars if (mark := self._mark(atom)) is not None]
            for var in variables:
                cell = self.env.read(var, None)
                self.marks[var] = self.tape.add(cell[...], taken, site.number)

    def _taken(self, site: Site, atom: Any, operand: Any) -> Slot | None:
        """Return the mark of an operand; a cast that is made for an operation may overflow."""
        mark = self._mark(atom)
        if mark is None or self.env.read(atom, None).dtype == operand.dtype:
            return mark
        return self.tape.add(operand, [mark], site.number)

    def _write(self, eqn: JaxprEqn, decision: Decision | None, results: Sequence[Any]) -> None:
        """Store results, narrow ones behind a barrier: XLA must not widen what is measured."""
        if decision is None:
            none = [None] * len(results)
            self.env.write(eqn.outvars, results, none, [False] * len(results))
        else:
            barriers = [
                is_narrow(p) or has_barrier
                for p, has_barrier in zip(
                    decision.outputs, decision.plan.hints.barriers, strict=True
                )
            ]
            self.env.write(eqn.outvars, results, decision.outputs, barriers)

    def _shadows(self, eqn: JaxprEqn, decision: Decision | None) -> list[Any]:
        """Compute the results in the original precision; ``None`` where they are the same."""
        narrows = decision is not None and (decision.is_narrow or decision.sent)
        # Not asked of a jaxpr's variables alone: a literal cannot be a key.
        known = [literal(a) is None and a in self.shadows for a in eqn.invars]
        if not self.owner.shadows or _is_foreign(eqn) or not (narrows or any(known)):
            return [None] * len(eqn.outvars)
        pairs = zip(eqn.invars, known, strict=True)
        return jax_compat.bind(
            eqn, [self.shadows[a] if k else self.env.read(a, None) for a, k in pairs]
        )

    def _value(self, atom: Any, low: Any, precision: Precision | None) -> Value:
        """Return a value as it leaves for another block."""
        if literal(atom) is not None:
            return Value(low, mark=self._mark(atom))
        shadow = self.shadows.get(atom)
        if shadow is None and is_narrow(precision) and self.owner.shadows:
            shadow = self.env.read(atom, None)
        return Value(low, shadow, self.marks.get(atom))

    def _mark(self, atom: Any) -> Slot | None:
        number = literal(atom)
        if number is None:
            return self.marks.get(atom)
        return self.owner.given(np.asarray(number), self.tape)

    def _know(self, var: Any, value: Value) -> None:
        if value.shadow is not None:
            self.shadows[var] = value.shadow
        if value.mark is not None:
            self.marks[var] = value.mark


def _import_marks(tape: Tape, values: Sequence[Value]) -> list[Value]:
    """Move the marks of values to this block's tape."""
    slots = iter(tape.adopt([value.mark for value in values if value.mark is not None]))
    return [v if v.mark is None else v._replace(mark=next(slots)) for v in values]


def _export_marks(tape: Tape, values: Sequence[Value]) -> list[Value]:
    """Replace the slots of values by the rows of their marks, for another tape."""
    rows = iter(tape.rows([value.mark for value in values if value.mark is not None]))
    return [v if v.mark is None else v._replace(mark=next(rows)) for v in values]


def _is_call(eqn: JaxprEqn) -> bool:
    op = lookup(eqn.primitive)
    return op is not None and op.trait is Trait.CALL


def _report(watch: Watch, loops: tuple[Any, ...], operands: Sequence[Any]) -> None:
    """Send the operands of the wanted run to the host."""
    wanted = jnp.array(True)
    for done, iteration in zip(loops, watch.loops, strict=False):
        wanted &= done == iteration

    def tell(operands: Sequence[Any]) -> None:
        jax.debug.callback(watch.take, *operands)

    lax.cond(wanted, tell, lambda _: None, list(operands))


def _is_foreign(eqn: JaxprEqn) -> bool:
    """Return whether an equation must not run twice."""
    op = lookup(eqn.primitive)
    return bool(eqn.effects) or (op is not None and op.trait in _FOREIGN)


def _is_float(aval: Any) -> bool:
    return jax_compat.is_plain_array(aval) and jnp.issubdtype(aval.dtype, jnp.floating)


def _is_cell(atom: Any) -> bool:
    """Return whether a variable is a mutable array of inexact numbers."""
    return jax_compat.is_ref(atom.aval) and jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def _is_inexact(aval: Any) -> bool:
    return jax_compat.is_plain_array(aval) and jnp.issubdtype(aval.dtype, jnp.inexact)
