"""Decisions as plain data: a `Decision` per equation, a `Plan` per program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jaxamp.core import jax_compat
from jaxamp.core.features import Form, Outcome
from jaxamp.core.formats import Precision, is_narrow
from jaxamp.core.guards import Guard
from jaxamp.core.taxonomy import OpKind
from jaxamp.jaxprs.name_stack import clean_scope
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.policy.rules import Rule


class CotangentRounding(NamedTuple):
    """A rounding of the cotangent of a sum or product, for activation and parameter alike."""

    precision: Precision  # the precision that the cotangent is rounded to
    # Indices of the operands whose cotangent is read from behind the rounding's barrier.
    held: tuple[int, ...]


class InputCast(NamedTuple):
    """A cast of one operand of an equation, or of one input of a jaxpr."""

    position: int
    precision: Precision


class OperandRead(NamedTuple):
    """Read of one operand by an equation."""

    precision: Precision | None  # the precision that it is cast to; ``None`` leaves it as it is
    # Whether the equation makes a cast of its own rather than shares one. It does for a boundary
    # value, so that the cotangents of the casts are summed in f32; but contractions share one where
    # devices add up narrow gradients.
    own_cast: bool = False
    # The precision of the stored copy that is read, where the value itself is fused away; ``None``
    # reads the value.
    copy: Precision | None = None
    # Whether a contraction reads it uncast as well: it is differentiated with respect to the uncast
    # value, in f32.
    original: bool = False
    # Whether cotangents of a narrow value are summed over its readers in f32.
    sums_wide: bool = False


class Hints(NamedTuple):
    """Compiler hints for one equation; none changes the precision of anything.

    Attributes:
      barriers: per result, whether its rounding stands behind an optimization barrier: XLA may
        otherwise undo a rounding that a widening follows, and store the wide value.
      residuals: per result, whether it is a residual of its fused group: the backward pass reads
        it rather than recomputes it.
      unbarriered: whether it reads its operands from before their barriers.
      cotangent_rounding: the rounding of its result's cotangent; ``None`` where there is none.
      label_gather: whether it gathers one number per row, or scatters such into zeros, and is
        emitted as a comparison; even where nothing is narrow.
      moved_rounding: precision of a rounding of the operand that a reversal reverses as well;
        ``None`` where it does not.
      lone: whether it is a checkpoint that needs no barrier before what it recomputes.
    """

    barriers: tuple[bool, ...]
    residuals: tuple[bool, ...]
    unbarriered: bool = False
    cotangent_rounding: CotangentRounding | None = None
    label_gather: bool = False
    moved_rounding: Precision | None = None
    lone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EquationPlan:
    """The precisions of an equation, without the place; within a plan equal ones are one object.

    Attributes:
      reads: per operand, how it is read.
      outputs: per result, the precision that it is stored in; ``None`` leaves it as it is.
      hints: compiler hints.
      accumulation: precision of the arithmetic inside; ``None`` where there is none.
      inner: plans of the jaxprs in its parameters that are rewritten, in order.
      form: what a feature has emitted in place of the primitive, of operands so cast.
      invariant_forms: other forms of a loop's invariants, which the loop gets beside them for its
        body; indices are those of its operands.
    """

    reads: tuple[OperandRead, ...]
    outputs: tuple[Precision | None, ...]
    hints: Hints
    accumulation: Precision | None = None
    inner: tuple[JaxprPlan, ...] = ()
    form: Form | None = None
    invariant_forms: tuple[InputCast, ...] = ()

    @property
    def unchanged(self) -> bool:
        """Return whether the equation is emitted as it is."""
        precisions = *(read.precision for read in self.reads), *self.outputs, self.accumulation
        if self.hints.label_gather or any(self.hints.residuals) or not is_wide(precisions):
            return False
        return all(plan.unchanged for plan in self.inner)

    @property
    def originals(self) -> tuple[int, ...]:
        """Return the operands, by index, that are read uncast as well."""
        return tuple([i for i, read in enumerate(self.reads) if read.original])

    @property
    def second_reads(self) -> tuple[tuple[int, Precision | None], ...]:
        """Return the operands that are read twice, by index, and the precision of the second read.

        ``None`` stands for the value as it is stored.
        """
        stored: tuple[tuple[int, None], ...] = tuple((i, None) for i in self.originals)
        moved = ((0, self.hints.moved_rounding),) if self.hints.moved_rounding else ()
        return (*stored, *moved, *self.invariant_forms)


class Ground(NamedTuple):
    """Explanation of a decision, in one of the places where the equation runs."""

    reason: str  # the reason in one phrase
    guard: Guard | None  # the guard that applied; ``None`` if none did
    scope: str  # name stack of the equation, enclosing equations first


class Decision(NamedTuple):
    """A decision about one equation, with what reports show of it as properties.

    Attributes:
      eqn: the equation.
      plan: all that is needed to emit it.
      kind: kind of its primitive.
      ground: explanation of the plan.
    """

    eqn: JaxprEqn
    plan: EquationPlan
    kind: OpKind
    ground: Ground

    @property
    def reason(self) -> str:
        """The reason in one phrase."""
        return self.ground.reason

    @property
    def guard(self) -> Guard | None:
        """The guard that applied; ``None`` if none did."""
        return self.ground.guard

    @property
    def operands(self) -> tuple[Precision | None, ...]:
        """Per operand, the precision that it is cast to; ``None`` leaves it as it is."""
        return tuple([read.precision for read in self.plan.reads])

    @property
    def accumulation(self) -> Precision | None:
        """Precision of the arithmetic inside; ``None`` where there is none."""
        return self.plan.accumulation

    @property
    def outputs(self) -> tuple[Precision | None, ...]:
        """Per result, the precision that it is stored in; ``None`` leaves it as it is."""
        return self.plan.outputs

    @property
    def primitive(self) -> str:
        """Name of the primitive."""
        return self.eqn.primitive.name

    @property
    def operand(self) -> Precision | None:
        """Precision of the first float operand; that of its parts in a product of complex ones."""
        found = next((p for p in self.operands if p is not None), None)
        if found is None and self.kind is OpKind.COMPUTE:
            dtype = getattr(self.eqn.invars[0].aval, "dtype", None)
            return {"complex64": Precision.F32, "complex128": Precision.F64}.get(str(dtype))
        return found

    @property
    def is_narrow(self) -> bool:
        """Return whether anything is read or stored in low precision."""
        read = (p for r in self.plan.reads for p in (r.precision, r.copy))
        return any(map(is_narrow, (*read, *self.outputs)))

    @property
    def output(self) -> Precision | None:
        """Precision in which the first float result is stored."""
        return next((p for p in self.outputs if p is not None), None)

    @property
    def sent(self) -> Precision | None:
        """Narrow precision in which an operation sends a value that is wide before and after."""
        is_sent = self.operand is self.output is Precision.F32 and is_narrow(self.accumulation)
        return self.accumulation if is_sent else None

    @property
    def scope(self) -> str:
        """Scope path as the user wrote it."""
        return clean_scope(self.ground.scope)

    @property
    def source(self) -> str:
        """``file:line (function)`` of the user's code."""
        return jax_compat.user_line(self.eqn.source_info)


def is_wide(precisions: Iterable[Precision | None]) -> bool:
    """Return whether all of some precisions are float32 or not chosen by a policy."""
    return all(p is None or p is Precision.F32 for p in precisions)


class Reading(NamedTuple):
    """A value in the form in which it is read."""

    var: Var
    precision: Precision | None  # None: as it is stored
    is_copy: bool = False  # whether the stored copy in that precision is read, rather than a cast


class RematerializedEquation(NamedTuple):
    """An equation of an enclosing jaxpr that is emitted again inside, as it is."""

    eqn: JaxprEqn
    operands: tuple[int | np.ndarray, ...]  # the number of a value, or the array of a literal
    results: tuple[int, ...]


class RematerializedInput(NamedTuple):
    """An input that a jaxpr computes itself, from literals, rather than reads."""

    var: Var
    equations: tuple[RematerializedEquation, ...]
    value: int  # its number among their results


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JaxprPlan:
    """The plan of one jaxpr in one context; equal contexts of one jaxpr share one object."""

    # Per input, the precision that it arrives in; ``None`` where policies choose none.
    inputs: tuple[Precision | None, ...]
    decisions: tuple[Decision, ...]  # one per equation, in order
    # Per result, the precision that it leaves in; ``None`` leaves it as it is.
    outputs: tuple[Precision | None, ...]
    unchanged: bool  # whether nothing in it is narrow, so that the jaxpr is emitted as it is
    # Units to emit, in order: single equations by their index, and calls of fused groups.
    steps: tuple[int | FusionCall, ...]
    # Inputs that are computed rather than read, as that costs less.
    rematerialized: tuple[RematerializedInput, ...] = ()
    # Of a loop's body: other forms of invariants that it gets beside them (see ``assemble``);
    # indices are those of its inputs.
    invariant_forms: tuple[InputCast, ...] = ()

    def walk(self) -> Iterator[Decision]:
        """Yield every decision, nested ones after the equation that holds them."""
        for decision in self.decisions:
            yield decision
            for plan in decision.plan.inner:
                yield from plan.walk()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fusion:
    """A group of equations that is emitted as one unit; equal groups share one object."""

    equations: tuple[JaxprEqn, ...]  # without the scopes that are around all of them
    decisions: tuple[Decision, ...]  # one per equation
    recomputed: int  # how many, the first ones, belong to earlier groups and are recomputed
    inputs: tuple[Reading, ...]  # values of other equations, as these equations read them
    outputs: tuple[Reading, ...]  # values of these equations, as others read them

    @property
    def read_by_recomputed(self) -> tuple[bool, ...]:
        """Return, per input, whether an equation that is recomputed reads it."""
        read = {id(v) for eqn in self.equations[: self.recomputed] for v in eqn.invars}
        return tuple(id(reading.var) in read for reading in self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusionCall:
    """A fused group in one of its places, with the indices and variables of the jaxpr there."""

    fusion: Fusion
    members: tuple[int, ...]  # those first that it recomputes
    around: JaxprEqn  # its first equation, with the scopes that are around the whole group
    inputs: tuple[Reading, ...]
    outputs: tuple[Reading, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """The decisions for a whole program.

    Attributes:
      body: the plan of the outermost jaxpr.
      grounds: explanations of ``body.walk()``, one each: calls that run alike share a plan, which
        has the reasons and scopes of the first.
      policy: the policy that was applied.
      rule_counts: per rule of the policy, the number of equations that it decided.
      unknown: names of unknown primitives.
      jaxpr: the program itself, which reports read beside the decisions.
      repeated: the fused groups that have more than one place.
      found: regions of the program that features have replaced, and are equations of `jaxpr`.
      refused: what looks like such a region and stays as it is, with the reason.
    """

    body: JaxprPlan
    grounds: tuple[Ground, ...]
    policy: PrecisionPolicy
    rule_counts: tuple[int, ...]
    unknown: tuple[str, ...]
    jaxpr: ClosedJaxpr
    repeated: frozenset[Fusion]
    found: tuple[Outcome, ...] = ()
    refused: tuple[Outcome, ...] = ()

    def decisions(self) -> Iterator[Decision]:
        """Yield every decision, nested ones after the equation that holds them."""
        for decision, ground in zip(self.body.walk(), self.grounds, strict=True):
            yield decision._replace(ground=ground)

    @property
    def unmatched_rules(self) -> tuple[Rule, ...]:
        """The policy's rules that decided nothing."""
        pairs = zip(self.policy.rules, self.rule_counts, strict=True)
        return tuple(rule for rule, count in pairs if not count)

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
