"""An equation with its decision and storage, from which its row in a report is made."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.core.taxonomy import OpKind, op_of
from jaxamp.inspect import count
from jaxamp.inspect.count import Tally
from jaxamp.inspect.operation import Operation, Place, SourceFrame, frames_of, innermost
from jaxamp.jaxprs.call_sites import call_at
from jaxamp.jaxprs.contracted import EXPLICIT_PRECISION, OTHERS, size
from jaxamp.jaxprs.name_stack import clean_scope, is_transposed, joined_scope
from jaxamp.plan import Decision, Ground, JaxprPlan
from jaxamp.rewrite.primitives.accumulate import accumulate_p, contraction_of


class Stored:
    """The precision of every float of a jaxpr; ``None`` for what has none of jaxamp's formats."""

    def __init__(self, jaxpr: Jaxpr, plan: JaxprPlan) -> None:
        self._precisions = {var: of(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars)}
        self._roundings: set[tuple[Any, Precision]] = set()  # in memory beside the values
        arriving = zip(jaxpr.invars, plan.inputs, strict=True)
        self._precisions |= {var: p for var, p in arriving if p is not None}

    def write(self, eqn: JaxprEqn, decision: Decision) -> None:
        """Add the results of an equation."""
        self._precisions |= {var: of(var.aval) for var in eqn.outvars}
        pairs = zip(eqn.outvars, decision.outputs, strict=True)
        self._precisions |= {var: p for var, p in pairs if p is not None}
        roundings = decision.plan.hints.moved_rounding, decision.sent
        self._roundings |= {(eqn.outvars[0], p) for p in roundings if p}

    def precision(self, atom: Any) -> Precision | None:
        """Return the precision in which memory holds a value."""
        return of(atom.aval) if isinstance(atom, Literal) else self._precisions[atom]

    def source(self, atom: Any, precision: Precision | None) -> Precision | None:
        """Return the precision in which memory holds what a reader casts to `precision`."""
        if not isinstance(atom, Literal) and (atom, precision) in self._roundings:
            return precision
        return self.precision(atom)


def of(aval: Any) -> Precision | None:
    """Return the float format of a type; ``None`` where it has none of jaxamp's."""
    return Precision.of_dtype(getattr(aval, "dtype", None))


_KEY = "precision"
_INSIDE_JAX = re.compile(r"[/\\]jax[/\\]_src[/\\]")


def precision_source(eqn: JaxprEqn) -> str:
    """Return what sets the explicit precision of a product, in one phrase."""
    word = _word(eqn.params.get(_KEY))
    found = [
        (value, f"{code.co_filename.replace(chr(92), '/').rpartition('/')[2]}:{value.lineno}")
        for code, at in jax_compat.calls(eqn.source_info.traceback)
        if not _INSIDE_JAX.search(code.co_filename)
        and (call := call_at(code, at)) is not None
        and (value := _value(call)) is not None
    ]
    named = [place for value, place in found if not _is_passed_on(value)]
    places = named[-1:] or [place for _, place in found[:1]]
    by = f"in {places[0]}" if places else "by jax.default_matmul_precision, or by a library"
    return f"precision={word!r} is asked for {by}"


def _value(call: ast.Call) -> ast.expr | None:
    """Return the `precision` argument of a call, or of the call of its function."""
    calls = [call, *(node for node in ast.walk(call.func) if isinstance(node, ast.Call))]
    return next((k.value for c in calls for k in c.keywords if k.arg == _KEY), None)


def _is_passed_on(value: ast.expr) -> bool:
    """Return whether a value is that of a variable, or of an attribute of ``self``."""
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
        return value.value.id == "self"
    return isinstance(value, ast.Name)


def _word(precision: Any) -> str:
    first = precision[0] if isinstance(precision, tuple) else precision
    return str(getattr(first, "name", first)).lower()


Precisions = Sequence[Precision | None]


class Equation:
    """One equation with its decision.

    Calls that run alike share decisions; the ground is that of this one. ``needed`` tells which
    results of its jaxprs are needed; none named are all.
    """

    def __init__(
        self,
        eqn: JaxprEqn,
        decision: Decision,
        ground: Ground,
        stored: Stored,
        around: Equation | None,
        needed: Sequence[bool],
    ) -> None:
        self.eqn, self.decision, self.ground = eqn, decision, ground
        primitive, self.params = eqn.primitive, eqn.params
        if eqn.primitive is accumulate_p:
            primitive, self.params = contraction_of(eqn.params)
        op = op_of(primitive)
        self.name, self.trait, self.kind = primitive.name, op.trait, op.kind
        self.scope = joined_scope(around.scope if around else "", eqn)
        own: tuple[SourceFrame, ...] = frames_of(eqn.source_info)
        self.frames = own or (around.frames if around else ())
        self.needed = needed
        sent = decision.sent
        self._read(stored)
        stored.write(eqn, decision)
        self.stored = [sent] if sent else [stored.precision(v) for v in eqn.outvars]

    @property
    def place(self) -> Place:
        """The innermost of the user's own lines."""
        return innermost(self.eqn.source_info, self.frames)

    def operation(self, runs: int) -> Operation:
        """Return the row of the report."""
        eqn, ground = self.eqn, self.ground
        return Operation(
            primitive=self.name,
            kind=self.kind.value,
            arithmetic=self._arithmetic(),
            stored=_words(self.stored[:1], eqn.outvars)[0] if eqn.outvars else "",
            accumulation=self._accumulation(),
            operands=_types(self.read, eqn.invars),
            results=_types(self.stored, eqn.outvars),
            each=self._cost(),
            runs=runs,
            reason=self._reason(),
            guard=ground.guard.value if ground.guard else "",
            scope=clean_scope(self.scope),
            backward=is_transposed(self.scope),
            place=self.place,
            contraction=self.kind is OpKind.COMPUTE or self.name in OTHERS,
            emulated=self._emulated(),
        )

    def _emulated(self) -> str:
        form = self.decision.plan.form
        return "" if form is None else form.emulated(self.eqn)

    def _reason(self) -> str:
        if emulated := self._emulated():
            return f"{emulated}; {self.ground.reason}"
        reason, rest = self.ground.reason, self.ground.reason.removeprefix(EXPLICIT_PRECISION)
        return reason if rest == reason else precision_source(self.eqn) + rest

    def _read(self, stored: Stored) -> None:
        plan = self.decision.plan
        form, reads = plan.form, [*zip(self.eqn.invars, plan.reads, strict=True)]
        self.sources = [r.copy or stored.source(a, r.precision) for a, r in reads]
        self.read = [r.precision or r.copy or stored.precision(a) for a, r in reads]
        if form:
            self.read[:2] = list(form.formats)

    def _arithmetic(self) -> str:
        atoms = [*self.eqn.invars, *self.eqn.outvars]
        precisions = [*self.read, *self.stored]
        operand = self.decision.operand
        if operand is not None and self.kind is not OpKind.COMPUTE:
            return operand.short
        if self.eqn.primitive is accumulate_p:
            precisions = [Precision.of_dtype(self.eqn.params["how"].narrow)]
        named = next((p.short for p in precisions if p), "")
        return named or "".join(_words([None], atoms[-1:]))  # a print of no arrays has neither

    def _accumulation(self) -> str:
        if self.eqn.primitive is accumulate_p:
            return "f32"
        return self.decision.accumulation.short if self.decision.accumulation else ""

    def _cost(self) -> Tally:
        eqn = self.eqn
        avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
        reads, writes = count.touched(eqn)
        ins, out = avals[: len(eqn.invars)], eqn.outvars[0].aval if eqn.outvars else None
        moved = list(zip([*reads, *writes], [*self.sources, *self.stored], avals, strict=True))
        return Tally(
            operations=1,
            flops=count.flops(self.name, self.kind, self.params, ins, out),
            bytes=sum(stored_bytes(aval, p, n) for n, p, aval in moved),
            bytes_f32=sum(stored_bytes(aval, None, n) for n, _, aval in moved),
            bytes_narrow=sum(int(n * p.bits / 8) for n, p, _ in moved if p and p.bits <= 16),
        )


def stored_bytes(aval: Any, precision: Precision | None, count: int | None = None) -> int:
    """Return the bytes of an array in a precision, or of so many of its elements."""
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    width = itemsize if precision is None else precision.bits / 8
    return int(width * (size(aval) if count is None else count))


def dtype_word(aval: Any, precision: Precision | None) -> str:
    """Return the dtype of a value in one word: of the precision that it has, or of its type."""
    return precision.short if precision else str(getattr(aval, "dtype", aval))


def _words(precisions: Precisions, atoms: Sequence[Any]) -> list[str]:
    """Return the dtype of each value, in one word."""
    pairs = zip(precisions, atoms, strict=False)
    return [dtype_word(a.aval, p) for p, a in pairs]


def _types(precisions: Precisions, atoms: Sequence[Any]) -> tuple[str, ...]:
    """Return the type of each value in one word, such as ``bf16[8,128]``."""
    shapes = (",".join(map(str, getattr(a.aval, "shape", ()))) for a in atoms)
    pairs = zip(_words(precisions, atoms), shapes, strict=True)
    return tuple(f"{word}[{shape}]" for word, shape in pairs)
