"""Unfold a jaxpr, and all jaxprs nested in it, into one flat graph.

Values are numbered in program order, links are added where values enter and leave loops and
branches, and known numbers are propagated through simple arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive

from jaxamp.core import jax_compat, taxonomy
from jaxamp.core.intervals import Interval
from jaxamp.core.taxonomy import Op, Trait
from jaxamp.jaxprs.contracted import has_explicit_precision, terms
from jaxamp.jaxprs.interpret import walk
from jaxamp.jaxprs.name_stack import joined_names, without_repeats
from jaxamp.jaxprs.nested import RULED, called, is_region, loop, nested
from jaxamp.plan.graph.graph import Carry, Frame, Graph, Link, Nest, Node, Role

# A program that runs later, and where its first inputs are among the inputs and results before.
Sequel = tuple[ClosedJaxpr, Sequence[int]]


def unfold(closed: ClosedJaxpr, sequel: Sequel | None = None) -> tuple[Graph, Frame]:
    """Return the flat graph of a jaxpr and of its sequel, and the frame of the jaxpr itself."""
    graph = Graph()
    entries = tuple(graph.value(v.aval) for v in closed.jaxpr.invars)
    graph.sources.update(entries)
    frame = _Unfolder(graph).frame(closed, entries, "")
    graph.outputs.update(frame.exits)
    if sequel:
        later, places = sequel
        given = [(*entries, *frame.exits)[i] for i in places]
        others = [graph.value(v.aval) for v in later.jaxpr.invars[len(given) :]]
        graph.activations.update(others)
        graph.onward.update(_Unfolder(graph).frame(later, (*given, *others), "").exits)
    return graph, frame


class _Unfolder:
    """Builder of a graph, which walks nested jaxprs once, in order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._scopes: dict[tuple[str, int, int | None], str] = {}  # name stacks compare slowly
        self._ops: dict[Primitive, Op | None] = {}
        self._loops = self._whiles = 0  # around what is being unfolded

    def frame(self, body: ClosedJaxpr, entries: Sequence[int], scope: str) -> Frame:
        jaxpr, sites = body.jaxpr, list[Node | Nest]()
        pairs = zip(jaxpr.constvars, body.consts, strict=True)
        captured = [self._captured(var.aval, const) for var, const in pairs]

        def visit(eqn: JaxprEqn, ins: Sequence[int]) -> tuple[int, ...]:
            sites.append(self._site(eqn, tuple(ins), scope))
            return sites[-1].outs

        exits = tuple(walk(jaxpr, captured, entries, visit, self._literal))
        return Frame(jaxpr, tuple(entries), sites, exits, exits)

    def _site(self, eqn: JaxprEqn, ins: tuple[int, ...], outer: str) -> Node | Nest:
        primitive = eqn.primitive
        if primitive not in self._ops:
            self._ops[primitive] = taxonomy.lookup(primitive)
        op = self._ops[primitive]
        unfolder = _UNFOLDERS.get(op.trait) if op else None
        scope = self._scope(outer, eqn, holds=unfolder is not None)
        if op is not None and op.trait is Trait.ALLREDUCE and _is_local(eqn):
            op = taxonomy.TABLE["reduce_sum"]
        elif op is not None and op.trait is Trait.CONTRACTION and _is_outer(eqn):
            op = taxonomy.TABLE["mul"]
        elif primitive.name == "reduce_precision" and _rounds_nothing(eqn):
            op = taxonomy.TABLE["name"]
        if op is None:
            self.graph.unknown.setdefault(primitive.name, eqn)
        elif unfolder and not is_region(eqn):
            return unfolder(self, eqn, op, ins, scope)
        outs = tuple([self.graph.value(v.aval) for v in eqn.outvars])
        role = self._role(op, ins, outs)
        if role is Role.REDUCE and eqn.params.get("axes") == ():  # reduces no axis
            role = Role.ELEMENTWISE
        if role in _COPYING and ins and ins[0] in self.graph.constants:
            self.graph.constants.update(dict.fromkeys(outs, self.graph.constants[ins[0]]))
        elif eqn.primitive.name in _FOLDED:
            self._fold(eqn, ins, *outs)
        return self.graph.add(Node(role, ins, outs, eqn, op, scope))

    def _fold(self, eqn: JaxprEqn, ins: tuple[int, ...], out: int) -> None:
        """Record the result of arithmetic on known numbers, computed in float32."""
        constants = self.graph.constants
        if self.graph.is_float32[out] and constants.keys() >= {*ins}:
            with np.errstate(all="ignore"):
                operands = [np.float32(constants[v]) for v in ins]
                constants[out] = float(_FOLDED[eqn.primitive.name](*operands))

    def _call(self, eqn: JaxprEqn, op: Op, ins: tuple[int, ...], scope: str) -> Nest:
        scope = without_repeats(scope, eqn)
        frame = self.frame(called(eqn), ins, scope)
        if eqn.primitive.name in RULED:
            self.graph.ruled.update(ins)
            self.graph.ruled_results.update(frame.exits)
        return Nest(eqn, op, scope, ins, frame.exits, (frame,))

    def _branch(self, eqn: JaxprEqn, op: Op, ins: tuple[int, ...], scope: str) -> Nest:
        frames = tuple(self.frame(b, ins[1:], scope) for b in nested(eqn))
        joined = zip(*(f.exits for f in frames), strict=True)
        outs = tuple(self._link(Link.JOIN, *exits) for exits in joined)
        for frame in frames:
            frame.returns = outs
        if outs or eqn.effects:
            self.graph.indices.add(ins[0])
        return Nest(eqn, op, scope, ins, outs, frames)

    def _loop(self, eqn: JaxprEqn, op: Op, ins: tuple[int, ...], scope: str) -> Nest:
        wired = loop(eqn)
        tested, fixed, inits, sliced = wired.parts(ins)
        invariants = [self._link(Link.INVARIANT, v) for v in (*tested, *fixed)]
        inner = [self._link(Link.INIT, v) for v in inits]
        slices = [
            self._link(Link.SLICE, v, aval=var.aval)
            for v, var in zip(
                sliced, wired.body.jaxpr.invars[wired.invariants + wired.carries :], strict=True
            )
        ]
        entries = (*invariants, *inner, *slices)
        frames, conditions = [], len(self.graph.predicates)
        self._loops += 1
        if wired.test:
            if not self._whiles:
                self.graph.solving.update(invariants, inner)
            self._whiles += 1
            test = self.frame(wired.test, [*invariants[: len(tested)], *inner], scope)
            self.graph.predicates.add(test.exits[0])
            frames.append(test)
        body = self.frame(wired.body, [*invariants[len(tested) :], *inner, *slices], scope)
        frames.append(body)
        self._loops -= 1
        self._whiles -= wired.test is not None
        if self._whiles and len(self.graph.predicates) == conditions:
            self.graph.iterated.update(entries)
        results = self._close_carries(inits, inner, body.exits, wired.keeps_carries)
        made = zip(body.exits, eqn.outvars, strict=True)
        stacks = [self._link(Link.STACK, y, aval=v.aval) for y, v in [*made][wired.carries :]]
        body.returns = (*inner, *stacks)
        return Nest(eqn, op, scope, entries, (*results, *stacks), tuple(frames))

    def _close_carries(
        self, inits: Sequence[int], inner: Sequence[int], exits: Sequence[int], kept: bool
    ) -> list[int]:
        results = []
        for init, value, out in zip(inits, inner, exits[: len(inner)], strict=True):
            self.graph.add(Node(Role.LINK, (out,), (value,), link=Link.BACK))
            results.append(self._link(Link.RESULT, out))
            kept_here = kept or not self.graph.is_float32[value]
            is_outer = not self._loops
            self.graph.carries.append(Carry(init, value, out, results[-1], kept_here, is_outer))
        return results

    def _nested(self, eqn: JaxprEqn, op: Op, ins: tuple[int, ...], scope: str) -> Nest:
        frames = []
        for body in nested(eqn):
            entries = tuple(self.graph.value(v.aval) for v in body.jaxpr.invars)
            self.graph.sources.update(entries)
            frames.append(self.frame(body, entries, scope))
            self.graph.outputs.update(frames[-1].exits)
        outs = tuple(self.graph.value(v.aval) for v in eqn.outvars)
        self.graph.add(Node(Role.FIXED, ins, outs, eqn, op, scope))
        return Nest(eqn, op, scope, ins, outs, tuple(frames), keeps_signature=True)

    def _role(self, op: Op | None, ins: tuple[int, ...], outs: tuple[int, ...]) -> str:
        if op is None:
            return Role.FIXED
        if (
            op.trait is Trait.CONVERT
            and self.graph.is_float32[ins[0]]
            and self.graph.is_float32[outs[0]]
        ):
            return Role.MOVE
        role = _ROLES.get(op.trait, Role.FIXED)
        # A sum of several arrays of the result's own shape (`add_any`) reduces no axis.
        if role is Role.REDUCE and op.trait is Trait.SUM and len(ins) > 1 and len(outs) == 1:
            shape = self.graph.avals[outs[0]].shape
            if all(getattr(self.graph.avals[i], "shape", None) == shape for i in ins):
                return Role.ELEMENTWISE
        return role

    def _link(self, link: str, *ins: int, aval: Any = None) -> int:
        out = self.graph.value(self.graph.avals[ins[0]] if aval is None else aval)
        self.graph.add(Node(Role.LINK, ins, (out,), link=link))
        # Of arrays on a mesh JAX 0.10.2 makes the 1 in `1 - gate` an operand of the loop.
        if link is Link.INVARIANT and ins[0] in self.graph.constants:
            self.graph.constants[out] = self.graph.constants[ins[0]]
        return out

    def _captured(self, aval: Any, const: Any) -> int:
        value = self.graph.value(aval)
        self.graph.sources.add(value)
        if _is_readable(const) and self.graph.kinds[value] in "fiub":
            self.graph.captured[value] = const
        numbers = _numbers(const)
        if numbers.size:
            self.graph.extents[value] = Interval(float(numbers.min()), float(numbers.max()))
        if (number := _extreme(numbers)) is not None:
            self.graph.constants[value] = number
        return value

    def _literal(self, literal: Any) -> int:
        value, aval = self.graph.value(literal.aval), literal.aval
        is_real = aval.dtype != jax.dtypes.float0 and self.graph.kinds[value] != "c"
        if is_real and aval.shape == ():
            self.graph.constants[value] = float(jax_compat.literal_value(literal))
        return value

    def _scope(self, outer: str, eqn: JaxprEqn, *, holds: bool) -> str:
        info = eqn.source_info
        place = outer, id(info.name_stack), id(info.traceback) if holds else None
        if place not in self._scopes:
            self._scopes[place] = joined_names(outer, eqn)
        return self._scopes[place]


# Arithmetic in scales such as that of `scores / jnp.sqrt(width)`.
_FOLDED = {
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "neg": np.negative,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
}

_UNFOLDERS = {
    Trait.CALL: _Unfolder._call,
    Trait.MANUAL: _Unfolder._call,
    Trait.BRANCH: _Unfolder._branch,
    Trait.LOOP: _Unfolder._loop,
    Trait.NESTED: _Unfolder._nested,
}

_ROLES = {
    Trait.CONTRACTION: Role.CONTRACT,
    Trait.SUM: Role.REDUCE,
    Trait.ALLREDUCE: Role.REDUCE,
    Trait.PREFIX: Role.REDUCE,
    Trait.PRODUCT: Role.REDUCE,
    Trait.EXTREMUM: Role.REDUCE,
    Trait.EXACT: Role.ELEMENTWISE,
    Trait.ROUNDED: Role.ELEMENTWISE,
    Trait.INTEGRAL: Role.ELEMENTWISE,
    Trait.SMOOTH: Role.ELEMENTWISE,
    Trait.SENSITIVE: Role.ELEMENTWISE,
    Trait.SAME: Role.MOVE,
    Trait.PLACEMENT: Role.MOVE,
    Trait.SHAPE: Role.MOVE,
    Trait.PART: Role.MOVE,
    Trait.COLLECTIVE: Role.MOVE,
    Trait.VARY: Role.MOVE,
    Trait.MERGE: Role.MERGE,
    Trait.CONVERT: Role.CONVERT,
}

_COPYING = (Role.MOVE, Role.CONVERT)
_READABLE = 1 << 20  # a captured array of more elements is not searched for extreme values


def _is_local(eqn: JaxprEqn) -> bool:
    """Return whether an all-reduce runs over array axes only: what vmap makes of a psum."""
    return all(isinstance(axis, int) for axis in eqn.params.get("axes", (None,)))


def _is_outer(eqn: JaxprEqn) -> bool:
    """Return whether a contraction adds up nothing, and has no explicit precision to keep."""
    avals = [v.aval for v in eqn.invars]
    return terms(eqn.primitive.name, eqn.params, avals) == 1 and not has_explicit_precision(eqn)


def _rounds_nothing(eqn: JaxprEqn) -> bool:
    """Return whether a rounding keeps its operand's format: JAX rounds what a checkpoint saves."""
    operand: Any = eqn.invars[0].aval
    info = jax.numpy.finfo(operand.dtype)
    kept = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    return kept == (info.nexp, info.nmant)


def _is_readable(const: Any) -> bool:
    """Return whether a captured array is neither traced nor large."""
    return not isinstance(const, Tracer | jax.Ref) and getattr(const, "size", 0) <= _READABLE


def _numbers(const: Any) -> np.ndarray:
    """Return the numbers of a captured array, if it can be read and is float32."""
    if not _is_readable(const) or getattr(const, "dtype", None) != np.float32:
        return np.empty(0)
    const = np.asarray(const)
    is_nan = np.isnan(const)
    return const[~is_nan] if is_nan.any() else const


def _extreme(numbers: np.ndarray) -> float | None:
    """Return the finite, nonzero magnitude that is furthest from 1.

    A narrow format represents that number worst.
    """
    sizes = np.abs(numbers[np.isfinite(numbers)])
    nonzero = sizes[sizes > 0]
    if not nonzero.size:
        return None
    largest, smallest = float(nonzero.max()), float(nonzero.min())
    return largest if largest * smallest >= 1 else smallest
