"""Decisions as plain data: a `Decision` per equation, a `Plan` per program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision, is_narrow
from jaxamp.core.guards import Guard
from jaxamp.core.taxonomy import OpKind
from jaxamp.jaxprs.name_stack import clean_scope
from jaxamp.plan.precision.scaled import Scaled
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.policy.rules import Rule, unmatched


class Echo(NamedTuple):
    """How the cotangent of a sum is rounded: to a precision, as its activation is stored.

    Attributes:
      operand: index of the activation.
      precision: what the cotangent is rounded to.
      is_multiplied: whether products with the cotangent are summed over rows, too: one kernel then
        makes all sums of what is in memory.
    """

    operand: int
    precision: Precision
    is_multiplied: bool = False


class InputCast(NamedTuple):
    """A cast of one operand of an equation, or of one input of a jaxpr.

    Attributes:
      index: index of the operand or input.
      precision: the precision that it is cast to.
    """

    index: int
    precision: Precision


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class How:
    """How an equation runs, wherever it is; within a plan equal ones are one object.

    Attributes:
      operands: per operand, the precision it is cast to; ``None`` leaves it as it is.
      fresh: per operand, whether its cast is made anew here rather than shared. A boundary value's
        is: the cotangents of its casts are then summed in f32.
      copies: per operand, the precision of the stored copy that is read, where the value itself is
        fused away; ``None`` reads the value.
      outputs: per result, the precision it is stored in; ``None`` where it is not ours to choose.
      held: per result, whether the stored form itself must be what readers get: XLA may otherwise
        undo a rounding that is followed by a widening, and store the wide form.
      kept: per result, whether a backward pass reads it rather than computes it again, where the
        equation is one of a fused group.
      accumulation: precision of the arithmetic inside, ``None`` where there is none.
      unheld: whether it sums what is held, which it may read before the barrier.
      echo: how the cotangent of its result is rounded, if it is.
      picks: whether it looks up single numbers of an activation, or puts such into zeros: it is
        emitted anew even where nothing is narrow.
      inner: plans of the jaxprs in its parameters that are rewritten, in order.
      scaled: how the operands of a dot are quantized, once they have been cast.
      originals: operands of a contraction, by index, that are read uncast as well: the contraction
        is differentiated with respect to the uncast value, in f32.
      moved_rounding: precision of a rounding of the operand that a reversal reverses as well;
        ``None`` where it does not.
      invariant_casts: casts of a loop's invariants that the loop gets for its body; indices are
        those of its operands.
      wide_invariants: narrow invariants of a loop, as indices of its operands, that it gets in f32
        as well: their cotangents are summed over iterations in f32.
    """

    operands: tuple[Precision | None, ...]
    fresh: tuple[bool, ...]
    copies: tuple[Precision | None, ...]
    outputs: tuple[Precision | None, ...]
    held: tuple[bool, ...]
    kept: tuple[bool, ...]
    accumulation: Precision | None = None
    unheld: bool = False
    echo: Echo | None = None
    picks: bool = False
    inner: tuple[JaxprPlan, ...] = ()
    scaled: Scaled | None = None
    originals: tuple[int, ...] = ()
    moved_rounding: Precision | None = None
    invariant_casts: tuple[InputCast, ...] = ()
    wide_invariants: tuple[int, ...] = ()

    @property
    def unchanged(self) -> bool:
        """Return whether nothing in the equation is narrow, nor saved."""
        precisions = *self.operands, *self.outputs, self.accumulation
        if self.picks or any(self.kept) or not is_wide(precisions):
            return False
        return all(plan.unchanged for plan in self.inner)

    @property
    def second_reads(self) -> tuple[tuple[int, Precision | None], ...]:
        """Return the operands that are read twice, by index, and the precision of the other read.

        ``None`` stands for the value as it is stored.
        """
        stored: tuple[tuple[int, None], ...] = tuple((i, None) for i in self.originals)
        moved = ((0, self.moved_rounding),) if self.moved_rounding else ()
        wide = tuple((i, Precision.F32) for i in self.wide_invariants)
        return (*stored, *moved, *self.invariant_casts, *wide)


class Ground(NamedTuple):
    """Explanation of a decision, in one of the places where the equation runs.

    Attributes:
      reason: in one phrase.
      guard: the guard that applied, if one did.
      scope: its name stack, enclosing equations first.
    """

    reason: str
    guard: Guard | None
    scope: str


class Decision(NamedTuple):
    """Decision about one equation; the fields of `How` and `Ground` are properties of it.

    Attributes:
      eqn: the equation.
      how: how it runs.
      kind: kind of its primitive.
      ground: why.
    """

    eqn: JaxprEqn
    how: How
    kind: OpKind
    ground: Ground

    reason = property(attrgetter("ground.reason"))
    guard = property(attrgetter("ground.guard"))
    raw_scope = property(attrgetter("ground.scope"))
    operands = property(attrgetter("how.operands"))
    fresh = property(attrgetter("how.fresh"))
    copies = property(attrgetter("how.copies"))
    accumulation = property(attrgetter("how.accumulation"))
    outputs = property(attrgetter("how.outputs"))
    held = property(attrgetter("how.held"))
    kept = property(attrgetter("how.kept"))
    unheld = property(attrgetter("how.unheld"))
    echo = property(attrgetter("how.echo"))
    picks = property(attrgetter("how.picks"))
    inner = property(attrgetter("how.inner"))
    scaled = property(attrgetter("how.scaled"))
    originals = property(attrgetter("how.originals"))
    moved_rounding = property(attrgetter("how.moved_rounding"))
    invariant_casts = property(attrgetter("how.invariant_casts"))
    wide_invariants = property(attrgetter("how.wide_invariants"))

    @property
    def primitive(self) -> str:
        """Name of the primitive."""
        return self.eqn.primitive.name

    @property
    def operand(self) -> Precision | None:
        """Precision of the first float operand."""
        return next((p for p in self.operands if p is not None), None)

    @property
    def output(self) -> Precision | None:
        """Precision in which the first float result is stored."""
        return next((p for p in self.outputs if p is not None), None)

    @property
    def sent(self) -> Precision | None:
        """The narrow precision in which an operation sends what is wide before and after."""
        is_sent = self.operand is self.output is Precision.F32 and is_narrow(self.accumulation)
        return self.accumulation if is_sent else None

    @property
    def scope(self) -> str:
        """Scope path as the user wrote it."""
        return clean_scope(self.raw_scope)

    @property
    def source(self) -> str:
        """``file:line (function)`` of the user's code."""
        return jax_compat.user_line(self.eqn.source_info)


def is_wide(precisions: Iterable[Precision | None]) -> bool:
    """Return whether all of some precisions are float32 or not chosen by a policy."""
    return all(p is None or p is Precision.F32 for p in precisions)


class Form(NamedTuple):
    """How a value is read: as it is stored, or cast; held as for a ``How``."""

    precision: Precision | None
    held: bool = False


Forms = tuple[tuple[Var, Form], ...]


class Making(NamedTuple):
    """An equation that is emitted as it is; values are numbered, literals are given."""

    eqn: JaxprEqn
    numbers: tuple[Any, ...]
    ins: tuple[int, ...]
    outs: tuple[int, ...]


class Remake(NamedTuple):
    """An input that a jaxpr makes itself, by equations of the program around."""

    var: Var
    value: int
    makings: tuple[Making, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JaxprPlan:
    """How one jaxpr runs in one context; equal contexts of one jaxpr share one object.

    Attributes:
      inputs: precision in which each input arrives; ``None`` where it is not ours.
      decisions: one per equation, in order.
      outputs: precision in which each result leaves; ``None`` leaves it as it is.
      unchanged: whether nothing in it is narrow, so that the jaxpr can stay as it is.
      steps: what to emit, in order: single equations by their index, and fused groups.
      remakes: inputs that are not read, because it costs less to make them.
      invariant_casts: of a loop's body: casts of invariants that it gets beside them; indices are
        those of its inputs.
      wide_invariants: of a loop's body: narrow invariants, as indices of its inputs, that it gets
        in f32 as well: their cotangents are summed over iterations in f32.
    """

    inputs: tuple[Precision | None, ...]
    decisions: tuple[Decision, ...]
    outputs: tuple[Precision | None, ...]
    unchanged: bool
    steps: tuple[int | Step, ...]
    remakes: tuple[Remake, ...] = ()
    invariant_casts: tuple[InputCast, ...] = ()
    wide_invariants: tuple[int, ...] = ()

    def walk(self) -> Iterator[Decision]:
        """Yield every decision, nested ones after the equation that holds them."""
        for decision in self.decisions:
            yield decision
            for plan in decision.inner:
                yield from plan.walk()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fusion:
    """A group of equations that is emitted as one unit; equal groups share one object.

    Attributes:
      equations: the equations, without the names that are around all of them.
      decisions: one per equation.
      makers: how many of the first equations belong to other groups, and are computed again here.
      takes: what they read of others.
      gives: what others read of them.
    """

    equations: tuple[JaxprEqn, ...]
    decisions: tuple[Decision, ...]
    makers: int
    takes: Forms
    gives: Forms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """A fused group in its place.

    Attributes:
      fusion: the group.
      members: indices of its equations, those first that it computes again.
      around: its first equation, with the names that are around the whole group.
      takes: what it reads.
      gives: what is read of it.
    """

    fusion: Fusion
    members: tuple[int, ...]
    around: JaxprEqn
    takes: Forms
    gives: Forms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """The decisions for a whole program.

    Attributes:
      body: the plan of the outermost jaxpr.
      grounds: why, for each of ``body.walk()``: calls that run alike share a plan, which has the
        reasons and scopes of the first.
      policy: the policy that was applied.
      rule_counts: how many equations each of the policy's rules decided.
      unknown: names of primitives that nobody has described.
      jaxpr: the program itself, which reports read beside the decisions.
      repeated: the fused groups that have more than one place.
      steer: what has told how XLA is steered, for the derivative rules that are planned later.
    """

    body: JaxprPlan
    grounds: tuple[Ground, ...]
    policy: PrecisionPolicy
    rule_counts: tuple[int, ...]
    unknown: tuple[str, ...]
    jaxpr: ClosedJaxpr
    repeated: frozenset[Fusion]
    steer: Callable[..., Any]

    def decisions(self) -> Iterator[Decision]:
        """Yield every decision, nested ones after the equation that holds them."""
        for decision, ground in zip(self.body.walk(), self.grounds, strict=True):
            yield decision._replace(ground=ground)

    def summary(self) -> dict[tuple[OpKind, str], int]:
        """Count equations per kind and precision of arithmetic (`"-"` without floats)."""
        counts: Counter[tuple[OpKind, str]] = Counter()
        for decision in self.decisions():
            precision = decision.operand or decision.output
            counts[decision.kind, precision.short if precision else "-"] += 1
        return dict(counts)

    def reasons(self) -> Counter[str]:
        """Count how often each reason was given."""
        return Counter(decision.reason for decision in self.decisions())

    @property
    def unmatched_rules(self) -> tuple[Rule, ...]:
        """The policy's rules that decided nothing."""
        return unmatched(self.policy.rules, self.rule_counts)

    def __str__(self) -> str:
        lines = [f"plan under {self.policy}"]
        lines += [_line(d) for d in self.decisions()]
        lines += [f"rule matched nothing: {rule}" for rule in self.unmatched_rules]
        lines += [f"unknown primitive, left as it is: {name}" for name in self.unknown]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Plan under {self.policy}: {len(self.grounds)} operations>"


def _line(d: Decision) -> str:
    operand, output = _short(d.operand), _short(d.output)
    return f"{d.primitive:<22} {d.kind.value:<13} {operand:>5} -> {output:<5} {d.reason}"


def _short(precision: Precision | None) -> str:
    return precision.short if precision else "-"
