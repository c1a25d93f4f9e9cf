"""The whole program as one flat graph: a list of nodes over numbered values.

Nested jaxprs are unfolded into it (`unfold.py`), so that every analysis is a plain sweep over
`Graph.nodes`. A transparent call leaves no node: its inputs and results are the caller's values. A
loop or branch leaves `LINK` nodes where a value enters it, is carried to the next iteration, or
leaves it. `Frame` and `Nest` record which jaxpr each node comes from, so that decisions can be
returned to the jaxprs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from jax.errors import InconclusiveDimensionOperation
from jax.extend.core import Jaxpr, JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.core.intervals import Interval
from jaxamp.core.semantics import UNKNOWN, Linear
from jaxamp.core.taxonomy import Op, OpKind, Trait


class Role:
    """Effect of a node on values, as far as precision is concerned, in words.

    Not an `enum`: a node is asked for its role 75 times, and CPython 3.11 looks up a member of an
    enum in 72 ns, and one of these in 18.
    """

    CONTRACT = "contract"
    REDUCE = "reduce"
    ELEMENTWISE = "elementwise"
    MOVE = "move"
    MERGE = "merge"
    CONVERT = "convert"
    FIXED = "fixed"  # reads and returns its original dtypes
    LINK = "link"


_COMPUTING = (Role.ELEMENTWISE, Role.CONTRACT, Role.MERGE)  # and move nothing


class Link:
    """Kind of a `LINK` node, in words."""

    INVARIANT = "invariant"  # into a loop, the same in every iteration
    SLICE = "slice"  # into a loop, one slice per iteration
    INIT = "init"  # into a carry
    BACK = "back"  # from the end of an iteration to the next
    RESULT = "result"  # out of a carry
    STACK = "stack"  # out of a loop, stacked
    JOIN = "join"  # out of the branches of a cond


class Node:
    """An equation that computes, or a link.

    Attributes:
      role: what it does to values.
      ins: the values that it reads.
      outs: the values that it computes.
      eqn: the equation; `None` for a link.
      scope: its name stack, enclosing equations first.
      link: the kind of link, `None` for an equation.
      name: name of the primitive; empty for a link.
      kind: kind of the primitive; Boundary where the primitive is unknown.
      trait: trait of the primitive; opaque where the primitive is unknown.
      semantics: arithmetic of the primitive.
      op: the primitive's entry in the table, if there is one.
      index: its position in the graph.
      multiplies: whether it is a product of matrices, or an outer one: an elementwise role.
      moves: pairs of an operand and the result that it becomes, of a node that moves or reduces
        values. With as many operands as results these correspond one to one (an
        `optimization_barrier`); else the first operand moves, and the others are indices (of a
        `gather`).
    """

    __slots__ = (
        *("role", "ins", "outs", "eqn", "op", "scope", "link"),
        *("name", "kind", "trait", "semantics", "index", "multiplies", "moves"),
    )

    def __init__(
        self,
        role: str,
        ins: tuple[int, ...],
        outs: tuple[int, ...],
        eqn: Any = None,
        op: Op | None = None,
        scope: str = "",
        link: str | None = None,
    ) -> None:
        self.role, self.ins, self.outs = role, ins, outs
        self.eqn, self.op, self.scope, self.link = eqn, op, scope, link
        self.name: str = "" if eqn is None else eqn.primitive.name
        self.kind = OpKind.BOUNDARY if op is None else op.kind
        self.trait = Trait.OPAQUE if op is None else op.trait
        self.semantics = UNKNOWN if op is None else op.semantics
        self.index = -1
        self.multiplies = role is Role.CONTRACT or self.name == "dot_general"
        self.moves: tuple[tuple[int, int], ...] = ()
        if role not in _COMPUTING:
            moving = ins if len(ins) == len(outs) else ins[:1] * len(outs)
            self.moves = tuple(zip(moving, outs, strict=False))

    @property
    def is_elementwise(self) -> bool:
        """Return whether each element of a result is made of single elements of the operands."""
        return self.role in (Role.ELEMENTWISE, Role.MOVE, Role.MERGE)

    def is_linear_in(self, value: int) -> bool:
        """Return whether the results are linear in an operand with the others fixed.

        Choices among operands are, and of products of matrices nothing is said here.
        """
        if self.role not in (Role.ELEMENTWISE, Role.REDUCE):
            return self.role not in (Role.CONTRACT, Role.FIXED)
        linear = self.semantics.linear
        if linear is Linear.FIRST:
            return value not in self.ins[1:]
        return linear is Linear.ALL or (linear is Linear.EACH and self.ins.count(value) == 1)


@dataclass(slots=True, eq=False)
class Carry:
    """A loop carry: its values, and what is known of it."""

    init: int  # before the loop
    inner: int  # at the start of an iteration
    out: int  # at the end of an iteration
    result: int  # after the loop
    keeps_dtype: bool  # whether it stays in its original dtype
    is_outer: bool  # of a loop that is in no other


@dataclass(slots=True, eq=False)
class Nest:
    """An equation that holds jaxprs."""

    eqn: JaxprEqn
    op: Op  # the primitive's entry in the table
    scope: str  # its name stack, enclosing equations first
    entries: tuple[int, ...]  # per operand, the value inside whose storage it takes
    outs: tuple[int, ...]
    frames: tuple[Frame, ...]  # in the order of the parameters that hold the jaxprs
    keeps_signature: bool = False  # whether these take and return their original dtypes
    kind: ClassVar[OpKind] = OpKind.BOUNDARY


@dataclass(slots=True, eq=False)
class Frame:
    """A jaxpr in one of the places where it runs.

    What it `returns` is, per result, the value whose storage that takes: of the body of a loop the
    carry or the stacked array, of a branch the joined result.
    """

    jaxpr: Jaxpr
    entries: tuple[int, ...]
    sites: list[Node | Nest]  # one per equation
    exits: tuple[int, ...]
    returns: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Graph:
    """A program, flat."""

    avals: list[Any] = field(default_factory=list)  # abstract value of each value
    # Per value, 1 if it is a float32 array, which a policy may lower.
    is_float32: bytearray = field(default_factory=bytearray)
    # Numpy's letter for the kind of each value's dtype, `"f"` or `"i"` say; `"O"` for what is no
    # array of numbers.
    kinds: list[str] = field(default_factory=list)
    # Number of elements of each value; symbolic where its shape is.
    sizes: list[Any] = field(default_factory=list)
    # Known numbers by value: literals, simple arithmetic on them, and arrays broadcast from them.
    # For a captured array it is the number furthest from 1.
    constants: dict[int, float] = field(default_factory=dict)
    extents: dict[int, Interval] = field(default_factory=dict)  # intervals of captured arrays
    # Captured arrays that are neither traced nor large.
    captured: dict[int, Any] = field(default_factory=dict)
    # Where the numbers of each value lie; see `ranges.py`.
    ranges: list[Interval] = field(default_factory=list)
    # Per value, 1 if its numbers are known to be whole.
    whole: bytearray = field(default_factory=bytearray)
    # In program order; the links of a loop stand where the loop does.
    nodes: list[Node] = field(default_factory=list)
    # Nodes by name of their primitive, in program order; links under "".
    named: dict[str, list[Node]] = field(default_factory=dict)
    # Nodes that multiply matrices, in program order.
    products: list[Node] = field(default_factory=list)
    # Per value that a node moves, the one that it was moved from.
    moved_from: dict[int, int] = field(default_factory=dict)
    sources: set[int] = field(default_factory=set)  # boundary values: inputs and captured constants
    outputs: set[int] = field(default_factory=set)  # results of the program
    # Inputs that arrive narrow, because Compute outside has made them.
    activations: set[int] = field(default_factory=set)
    # Inputs that arrive after the rest has been computed: tangents.
    later: set[int] = field(default_factory=set)
    # Results that Compute outside reads; these may leave narrow.
    onward: set[int] = field(default_factory=set)
    # Operands of functions with derivative rules of their own (`custom_jvp`).
    ruled: set[int] = field(default_factory=set)
    ruled_results: set[int] = field(default_factory=set)  # results of such functions
    predicates: set[int] = field(default_factory=set)  # conditions of while loops
    # What is inside of a while loop that is in no other: its invariants and carries, as they arrive
    # in an iteration.
    solving: set[int] = field(default_factory=set)
    # What is inside of a loop without a condition, itself inside of a while loop: its invariants,
    # carries and slices, as they arrive in an iteration.
    iterated: set[int] = field(default_factory=set)
    indices: set[int] = field(default_factory=set)  # values that select a branch
    carries: list[Carry] = field(default_factory=list)  # carries of all loops
    # Of these that nothing but curves changes, the values in a loop and after it: `carries.py`.
    gated: set[int] = field(default_factory=set)
    # Products that are not to be rounded, each with why; see `cancellation/`.
    precise: dict[Node, Any] = field(default_factory=dict)
    unrounded: set[int] = field(default_factory=set)  # what these read
    # Sums from which a term is subtracted later; see `undone_sums.py`.
    undone: set[int] = field(default_factory=set)
    # Results of matrix factorizations and solves; see `provenance.py`.
    factors: set[int] = field(default_factory=set)
    # Results of products of numbers that the program makes of known ones.
    written: set[int] = field(default_factory=set)
    # Products elsewhere that decide when a loop stops; see `repeated_decisions.py`.
    deciding: frozenset[Hashable] = frozenset()
    # Per value, the nodes that read it, in program order.
    readers: list[list[Node]] = field(default_factory=list)
    # Unknown primitives, each with its first equation.
    unknown: dict[str, JaxprEqn] = field(default_factory=dict)
    _types: dict[Any, tuple[bool, str, Any]] = field(default_factory=dict)

    def value(self, aval: Any) -> int:
        """Add a value and return its number."""
        is_float32, kind, size = self._types.get(aval) or self._types.setdefault(
            aval, _describe(aval)
        )
        self.avals.append(aval)
        self.is_float32.append(is_float32)
        self.kinds.append(kind)
        self.sizes.append(size)
        self.readers.append(_UNREAD)
        return len(self.avals) - 1

    def add(self, node: Node) -> Node:
        """Append a node, and record it as reader of its operands."""
        node.index = len(self.nodes)
        self.nodes.append(node)
        self.named.setdefault(node.name, []).append(node)
        if node.multiplies:
            self.products.append(node)
        if node.role is Role.MOVE:
            for source, out in node.moves:
                self.moved_from[out] = source
        readers = self.readers
        for value in node.ins:
            found = readers[value]
            if not found:
                readers[value] = [node]  # one element: most values have one reader
            elif found[-1] is not node:
                found.append(node)
        return node

    def origin(self, value: int) -> int:
        """Return the value that a value was moved from, however often."""
        while value in self.moved_from:
            value = self.moved_from[value]
        return value


_UNREAD: list[Node] = []  # shared by all values without readers; stays empty


def _describe(aval: Any) -> tuple[bool, str, Any]:
    """Return whether a type is a float32 array, the kind of its dtype, and its size."""
    is_float32 = jax_compat.is_castable(aval) and aval.dtype == np.float32
    kind = getattr(getattr(aval, "dtype", None), "kind", "O")
    return is_float32, kind, math.prod(getattr(aval, "shape", ()))


def is_smaller(size: Any, other: Any) -> bool:
    """Return whether a size is known to be smaller; symbolic sizes may not be comparable."""
    try:
        return bool(size < other)
    except InconclusiveDimensionOperation:
        return False


def is_nonnegative(graph: Graph, value: int) -> bool:
    """Return whether no number of a value is negative."""
    return graph.ranges[value].low >= 0


def is_apart(graph: Graph, value: int) -> bool:
    """Return whether a value is bounded away from zero: no rounding makes it zero."""
    low, high = graph.ranges[value]
    return low >= _FAR or high <= -_FAR


_FAR = 2**-8  # it and its reciprocal are in float16's range


def sites_of(frame: Frame) -> list[Node | Nest]:
    """Return every equation of a jaxpr, nested ones after the one that holds them."""
    found = list[Node | Nest]()
    for site in frame.sites:
        found.append(site)
        if isinstance(site, Nest):
            found += [inner for body in site.frames for inner in sites_of(body)]
    return found


def nodes_of(site: Node | Nest) -> Sequence[Node]:
    """Return the node itself, or all nodes of the jaxprs that an equation holds."""
    if isinstance(site, Node):
        return (site,)
    return [n for frame in site.frames for n in sites_of(frame) if isinstance(n, Node)]
