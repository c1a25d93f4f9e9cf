"""The whole program as one flat graph: nested jaxprs unfolded, values numbered.

Analyses become plain sweeps over ``Graph.nodes``. A transparent call leaves no trace (its inputs
and results are the caller's values); a loop or branch leaves ``LINK`` nodes where a value changes
hands. ``Frame`` remembers where each jaxpr was, so that decisions can be handed back.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive

from jaxamp import _compat, taxonomy
from jaxamp.plan import wiring
from jaxamp.rules import without_repeats
from jaxamp.taxonomy import Op, OpKind, Trait


class Role(enum.Enum):
    """What a node does to values, as far as precision is concerned."""

    CONTRACT = "contract"
    REDUCE = "reduce"
    ELEMENTWISE = "elementwise"
    MOVE = "move"
    MERGE = "merge"
    CONVERT = "convert"
    FIXED = "fixed"  # reads and gives its original dtypes
    LINK = "link"

    __hash__ = object.__hash__  # Enum's own goes through the name, in Python


class Link(enum.Enum):
    """What a ``LINK`` node stands for."""

    INVARIANT = "invariant"  # into a loop, the same every time
    SLICE = "slice"  # into a loop, a slice each time
    INIT = "init"  # into a carry
    BACK = "back"  # end of the body to the carry
    RESULT = "result"  # out of a carry
    STACK = "stack"  # out of a loop, stacked
    JOIN = "join"  # out of the branches of a cond

    __hash__ = object.__hash__  # Enum's own goes through the name, in Python


class Node:
    """An equation that computes, or a link.

    Attributes:
      role: what it does to values.
      ins: the values that it reads.
      outs: the values that it makes.
      eqn: the equation; a link has none.
      scope: its name stack, enclosing equations first.
      link: what it stands for, if it is a link.
      name: of its primitive; empty for a link.
      kind: its kind; what nobody has described is Boundary.
      trait: its trait; what nobody has described is opaque.
      op: the entry of its primitive, if that was described.
      index: its place in the graph.
    """

    __slots__ = (
        *("role", "ins", "outs", "eqn", "op", "scope", "link"),
        *("name", "kind", "trait", "index"),
    )

    def __init__(
        self,
        role: Role,
        ins: tuple[int, ...],
        outs: tuple[int, ...],
        eqn: Any = None,
        op: Op | None = None,
        scope: str = "",
        link: Link | None = None,
    ) -> None:
        self.role, self.ins, self.outs = role, ins, outs
        self.eqn, self.op, self.scope, self.link = eqn, op, scope, link
        self.name: str = "" if eqn is None else eqn.primitive.name
        self.kind = OpKind.BOUNDARY if op is None else op.kind
        self.trait = Trait.OPAQUE if op is None else op.trait
        self.index = -1


@dataclass(slots=True, eq=False)
class Carry:
    """A value that a loop hands from one iteration to the next."""

    init: int
    inner: int
    out: int
    result: int
    kept: bool  # whether it stays in its original dtype


@dataclass(slots=True, eq=False)
class Nest:
    """An equation that carries jaxprs."""

    eqn: JaxprEqn
    op: Op
    scope: str
    entries: tuple[int, ...]  # per operand, the value inside whose storage it takes
    outs: tuple[int, ...]
    frames: tuple[Frame, ...]
    keeps_signature: bool = False


@dataclass(slots=True, eq=False)
class Frame:
    """A jaxpr in its place; ``returns`` are the values whose storage its results take."""

    jaxpr: Jaxpr
    entries: tuple[int, ...]
    sites: list[Node | Nest]
    exits: tuple[int, ...]
    returns: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Graph:
    """A program, flat.

    Attributes:
      avals: type of each value.
      ours: whether each value is a float32 array, which a policy may lower.
      kinds: the letter that numpy has for the dtype of each value; ``"O"`` where it is none of its.
      sizes: number of elements of each value; symbolic where its shape is.
      constants: known numbers: literals, simple arithmetic on them, what is broadcast from them.
      nodes: in program order; the links of a loop stand where it does.
      sources: boundary values: inputs, captured constants.
      outputs: results of the program.
      predicates: what decides whether a while loop goes on.
      indices: what chooses a branch.
      activations: inputs that arrive narrow: made by Compute outside.
      later: inputs that arrive after the rest has been computed: tangents.
      onward: results that leave narrow: read by Compute outside.
      ruled: what functions take that have derivatives of their own.
      ruled_results: what these functions give.
      uses: nodes that read each value.
    """

    avals: list[Any] = field(default_factory=list)
    ours: bytearray = field(default_factory=bytearray)
    kinds: list[str] = field(default_factory=list)
    sizes: list[Any] = field(default_factory=list)
    constants: dict[int, float] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    sources: set[int] = field(default_factory=set)
    outputs: set[int] = field(default_factory=set)
    activations: set[int] = field(default_factory=set)
    later: set[int] = field(default_factory=set)
    onward: set[int] = field(default_factory=set)
    ruled: set[int] = field(default_factory=set)
    ruled_results: set[int] = field(default_factory=set)
    predicates: set[int] = field(default_factory=set)
    indices: set[int] = field(default_factory=set)
    carries: list[Carry] = field(default_factory=list)
    uses: list[list[Node]] = field(default_factory=list)
    unknown: dict[str, JaxprEqn] = field(default_factory=dict)
    _types: dict[Any, tuple[bool, str, Any]] = field(default_factory=dict)

    def value(self, aval: Any) -> int:
        """A new value."""
        ours, kind, size = self._types.get(aval) or self._types.setdefault(aval, _describe(aval))
        self.avals.append(aval)
        self.ours.append(ours)
        self.kinds.append(kind)
        self.sizes.append(size)
        self.uses.append([])
        return len(self.avals) - 1

    def add(self, node: Node) -> Node:
        """Appends a node and notes what it reads."""
        node.index = len(self.nodes)
        self.nodes.append(node)
        for value in node.ins:
            readers = self.uses[value]
            if not readers or readers[-1] is not node:
                readers.append(node)
        return node


def _describe(aval: Any) -> tuple[bool, str, Any]:
    """Whether a value of some type is ours, the kind of its dtype, and its size."""
    ours = _compat.is_plain_array(aval) and aval.dtype == np.float32
    kind = getattr(getattr(aval, "dtype", None), "kind", "O")
    return ours, kind, math.prod(getattr(aval, "shape", ()))


def unfold(jaxpr: Jaxpr, consts: Sequence[Any]) -> tuple[Graph, Frame]:
    """The flat graph of a jaxpr, and its frame."""
    graph = Graph()
    entries = tuple(graph.value(v.aval) for v in jaxpr.invars)
    graph.sources.update(entries)
    frame = _Unfolder(graph).frame(wiring.Body(jaxpr, tuple(consts)), entries, "")
    graph.outputs.update(frame.exits)
    return graph, frame


class _Unfolder:
    """Walks nested jaxprs once, in order, and fills a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._scopes: dict[tuple[str, Any], str] = {}
        self._scopes_by_id: dict[tuple[str, int], str] = {}  # comparing name stacks takes time
        self._ops: dict[Primitive, Op | None] = {}

    def frame(self, body: wiring.Body, entries: Sequence[int], scope: str) -> Frame:
        jaxpr = body.jaxpr
        env: dict[Any, int] = dict(zip(jaxpr.invars, entries, strict=True))
        for var, const in zip(jaxpr.constvars, body.consts, strict=True):
            env[var] = self._captured(var.aval, const)

        def read(atoms: Sequence[Any]) -> tuple[int, ...]:
            return tuple([self._literal(a) if isinstance(a, Literal) else env[a] for a in atoms])

        sites = []
        for eqn in jaxpr.eqns:
            ins = read(eqn.invars)
            site = self._site(eqn, ins, self._scope(scope, eqn))
            for var, out in zip(eqn.outvars, site.outs, strict=True):
                env[var] = out
            sites.append(site)
        exits = read(jaxpr.outvars)
        return Frame(jaxpr, tuple(entries), sites, exits, exits)

    def _site(self, eqn: JaxprEqn, ins: tuple[int, ...], scope: str) -> Node | Nest:
        primitive = eqn.primitive
        if primitive not in self._ops:
            self._ops[primitive] = taxonomy.lookup(primitive)
        op = self._ops[primitive]
        if op is not None and op.trait is Trait.ALLREDUCE and _is_local(eqn):
            op = taxonomy.TABLE["reduce_sum"]
        if op is None:
            self.graph.unknown.setdefault(primitive.name, eqn)
        elif (unfolder := _UNFOLDERS.get(op.trait)) and not wiring.is_region(eqn):
            return unfolder(self, eqn, op, ins, scope)
        outs = tuple([self.graph.value(v.aval) for v in eqn.outvars])
        role = self._role(op, ins, outs)
        if role is Role.REDUCE and eqn.params.get("axes") == ():  # folds nothing
            role = Role.ELEMENTWISE
        if role in (Role.MOVE, Role.CONVERT) and ins and ins[0] in self.graph.constants:
            self.graph.constants.update(dict.fromkeys(outs, self.graph.constants[ins[0]]))
        elif eqn.primitive.name in _FOLDED:
            self._fold(eqn, ins, *outs)
        return self.graph.add(Node(role, ins, outs, eqn, op, scope))

    def _fold(self, eqn: JaxprEqn, ins: tuple[int, ...], out: int) -> None:
        """Notes the result of an operation on known numbers, as float32 has it."""
        constants = self.graph.constants
        if self.graph.ours[out] and all(v in constants for v in ins):
            with np.errstate(all="ignore"):
                operands = [np.float32(constants[v]) for v in ins]
                constants[out] = float(_FOLDED[eqn.primitive.name](*operands))

    def _call(self, eqn: JaxprEqn, op: Op, ins: tuple[int, ...], scope: str) -> Nest:
        scope = without_repeats(scope, eqn)
        frame = self.frame(wiring.call_body(eqn), ins, scope)
        if eqn.primitive.name in wiring.RULED:
            self.graph.ruled.update(ins)
            self.graph.ruled_results.update(frame.exits)
        return Nest(eqn, op, scope, ins, frame.exits, (frame,))

    def _branch(self, eqn: JaxprEqn, op: Op, ins: tuple[int, ...], scope: str) -> Nest:
        frames = tuple(self.frame(b, ins[1:], scope) for b in wiring.branches(eqn))
        joined = zip(*(f.exits for f in frames), strict=True)
        outs = tuple(self._link(Link.JOIN, *exits) for exits in joined)
        for frame in frames:
            frame.returns = outs
        if outs or eqn.effects:
            self.graph.indices.add(ins[0])
        return Nest(eqn, op, scope, ins, outs, frames)

    def _loop(self, eqn: JaxprEqn, op: Op, ins: tuple[int, ...], scope: str) -> Nest:
        loop = wiring.loop(eqn)
        first, second = loop.test_invariants, loop.test_invariants + loop.invariants
        invariants = [self._link(Link.INVARIANT, v) for v in ins[:second]]
        inits, sliced = ins[second : second + loop.carries], ins[second + loop.carries :]
        inner = [self._link(Link.INIT, v) for v in inits]
        slices = [
            self._link(Link.SLICE, v, aval=var.aval)
            for v, var in zip(
                sliced, loop.body.jaxpr.invars[loop.invariants + loop.carries :], strict=True
            )
        ]
        frames = []
        if loop.test:
            test = self.frame(loop.test, [*invariants[:first], *inner], scope)
            self.graph.predicates.add(test.exits[0])
            frames.append(test)
        body = self.frame(loop.body, [*invariants[first:], *inner, *slices], scope)
        frames.append(body)
        results = self._close_carries(inits, inner, body.exits, loop.always_kept)
        stacks = [
            self._link(Link.STACK, y, aval=var.aval)
            for y, var in zip(body.exits[loop.carries :], eqn.outvars[loop.carries :], strict=True)
        ]
        body.returns = (*inner, *stacks)
        entries = (*invariants, *inner, *slices)
        return Nest(eqn, op, scope, entries, (*results, *stacks), tuple(frames))

    def _close_carries(
        self, inits: Sequence[int], inner: Sequence[int], exits: Sequence[int], kept: bool
    ) -> list[int]:
        results = []
        for init, value, out in zip(inits, inner, exits[: len(inner)], strict=True):
            self.graph.add(Node(Role.LINK, (out,), (value,), link=Link.BACK))
            results.append(self._link(Link.RESULT, out))
            kept_here = kept or not self.graph.ours[value]
            self.graph.carries.append(Carry(init, value, out, results[-1], kept_here))
        return results

    def _nested(self, eqn: JaxprEqn, op: Op, ins: tuple[int, ...], scope: str) -> Nest:
        frames = []
        for name in wiring.nested_params(eqn):
            body = wiring.body_of(eqn.params[name])
            entries = tuple(self.graph.value(v.aval) for v in body.jaxpr.invars)
            self.graph.sources.update(entries)
            frames.append(self.frame(body, entries, scope))
            self.graph.outputs.update(frames[-1].exits)
        outs = tuple(self.graph.value(v.aval) for v in eqn.outvars)
        self.graph.add(Node(Role.FIXED, ins, outs, eqn, op, scope))
        return Nest(eqn, op, scope, ins, outs, tuple(frames), keeps_signature=True)

    def _role(self, op: Op | None, ins: tuple[int, ...], outs: tuple[int, ...]) -> Role:
        if op is None:
            return Role.FIXED
        if op.trait is Trait.CONVERT and self.graph.ours[ins[0]] and self.graph.ours[outs[0]]:
            return Role.MOVE
        role = _ROLES.get(op.trait, Role.FIXED)
        # A sum of several arrays of the result's own shape (`add_any`) folds no axis.
        if role is Role.REDUCE and op.trait is Trait.SUM and len(ins) > 1 and len(outs) == 1:
            shape = self.graph.avals[outs[0]].shape
            if all(getattr(self.graph.avals[i], "shape", None) == shape for i in ins):
                return Role.ELEMENTWISE
        return role

    def _link(self, link: Link, *ins: int, aval: Any = None) -> int:
        out = self.graph.value(self.graph.avals[ins[0]] if aval is None else aval)
        self.graph.add(Node(Role.LINK, ins, (out,), link=link))
        return out

    def _captured(self, aval: Any, const: Any) -> int:
        value = self.graph.value(aval)
        self.graph.sources.add(value)
        if (number := _extreme(const)) is not None:
            self.graph.constants[value] = number
        return value

    def _literal(self, literal: Any) -> int:
        value = self.graph.value(literal.aval)
        number = _compat.literal_value(literal)
        is_number = literal.aval.dtype != jax.dtypes.float0 and np.isrealobj(number)
        if is_number and np.ndim(number) == 0:
            self.graph.constants[value] = float(number)
        return value

    def _scope(self, outer: str, eqn: JaxprEqn) -> str:
        stack = eqn.source_info.name_stack
        place = outer, id(stack)
        scope = self._scopes_by_id.get(place)
        if scope is None:
            scope = self._scopes.get((outer, stack))
            if scope is None:
                scope = self._scopes[outer, stack] = "/".join(filter(None, (outer, str(stack))))
            self._scopes_by_id[place] = scope
        return scope


# What scales are made of: `scores / jnp.sqrt(width)`.
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
    Trait.SHAPE: Role.MOVE,
    Trait.COLLECTIVE: Role.MOVE,
    Trait.VARY: Role.MOVE,
    Trait.MERGE: Role.MERGE,
    Trait.CONVERT: Role.CONVERT,
}

_READABLE = 1 << 20  # elements of a captured array that are looked at for extreme values


def _is_local(eqn: JaxprEqn) -> bool:
    """Whether a sum over devices is one over axes of the array: what vmap makes of a psum."""
    return all(isinstance(axis, int) for axis in eqn.params.get("axes", (None,)))


def _extreme(const: Any) -> float | None:
    """The finite number in a captured array that fits a narrow format worst, if it is at hand."""
    if isinstance(const, Tracer | jax.Ref) or getattr(const, "dtype", None) != np.float32:
        return None
    if const.size > _READABLE:
        return None
    const = np.asarray(const)
    finite = np.abs(const[np.isfinite(const)])
    nonzero = finite[finite > 0]
    if not nonzero.size:
        return None
    largest, smallest = float(nonzero.max()), float(nonzero.min())
    return largest if largest * smallest >= 1 else smallest
