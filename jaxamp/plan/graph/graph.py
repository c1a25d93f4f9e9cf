"""The whole program as one flat graph: a list of nodes over numbered values.

Nested jaxprs are unfolded into it (``unfold.py``), so that every analysis is a plain sweep over
``Graph.nodes``. A transparent call leaves no node: its inputs and results are the caller's values.
A loop or branch leaves ``LINK`` nodes where a value passes into it, around it or out of it.
``Frame`` and ``Nest`` remember which jaxpr each node came from, so that decisions can be given
back to the jaxprs.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.errors import InconclusiveDimensionOperation
from jax.extend.core import Jaxpr, JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import Op, OpKind, Trait


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
    """A value that a loop hands from one iteration to the next.

    Attributes:
      init: its value before the loop.
      inner: what the body reads of it.
      out: what the body makes of it.
      result: its value after the loop.
      keeps_dtype: whether it stays in its original dtype.
    """

    init: int
    inner: int
    out: int
    result: int
    keeps_dtype: bool


@dataclass(slots=True, eq=False)
class Nest:
    """An equation that carries jaxprs.

    Attributes:
      eqn: the equation.
      op: the entry of its primitive.
      scope: its name stack, enclosing equations first.
      entries: per operand, the value inside whose storage the operand takes.
      outs: its results.
      frames: the jaxprs, in the order of the parameters that hold them.
      keeps_signature: whether the jaxprs take and give their original dtypes.
    """

    eqn: JaxprEqn
    op: Op
    scope: str
    entries: tuple[int, ...]
    outs: tuple[int, ...]
    frames: tuple[Frame, ...]
    keeps_signature: bool = False


@dataclass(slots=True, eq=False)
class Frame:
    """A jaxpr in its place.

    Attributes:
      jaxpr: the jaxpr.
      entries: its inputs.
      sites: what each of its equations has become, in order.
      exits: its results.
      returns: per result, the value whose storage the result takes: for the body of a loop or
        branch that of the carry, the stack or the join that it goes into.
    """

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
      is_float32: whether each value is a float32 array, which a policy may lower.
      kinds: numpy's letter for the kind of each value's dtype, ``"f"`` or ``"i"`` say; ``"O"`` for
        what is no array of numbers.
      sizes: number of elements of each value; symbolic where its shape is.
      constants: the known numbers by value: literals, simple arithmetic on them, and arrays that
        are broadcast from them. Of a captured array it is the number that is furthest from 1.
      intervals: between which numbers a value lies that is made of known ones; see intervals.py.
      nodes: in program order; the links of a loop stand where it does.
      named: those of each primitive, by its name, in program order; links are named "".
      links: the kinds of links that there are.
      sources: boundary values: inputs and captured constants.
      outputs: results of the program.
      predicates: what decides whether a while loop goes on.
      indices: what chooses a branch.
      activations: inputs that arrive narrow, so that Compute outside has made them.
      later: inputs that arrive after the rest has been computed: tangents.
      onward: results that Compute outside reads; these may leave narrow.
      ruled: operands of functions with derivative rules of their own (``custom_jvp``).
      ruled_results: results of such functions.
      carries: what each loop hands from turn to turn.
      readers: the nodes that read each value, in program order.
      unknown: primitives that nobody has described, with the first equation of each.
    """

    avals: list[Any] = field(default_factory=list)
    is_float32: bytearray = field(default_factory=bytearray)
    kinds: list[str] = field(default_factory=list)
    sizes: list[Any] = field(default_factory=list)
    constants: dict[int, float] = field(default_factory=dict)
    intervals: dict[int, tuple[float, float]] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    named: dict[str, list[Node]] = field(default_factory=dict)
    links: set[Link] = field(default_factory=set)
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
    readers: list[list[Node]] = field(default_factory=list)
    unknown: dict[str, JaxprEqn] = field(default_factory=dict)
    _types: dict[Any, tuple[bool, str, Any]] = field(default_factory=dict)

    def value(self, aval: Any) -> int:
        """A new value."""
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
        """Appends a node and notes what it reads."""
        node.index = len(self.nodes)
        self.nodes.append(node)
        self.named.setdefault(node.name, []).append(node)
        if node.link is not None:
            self.links.add(node.link)
        readers = self.readers
        for value in node.ins:
            found = readers[value]
            if not found:
                readers[value] = [node]  # no longer than need be: most values have one reader
            elif found[-1] is not node:
                found.append(node)
        return node


_UNREAD: list[Node] = []  # one for all values that nothing reads; it stays empty


def _describe(aval: Any) -> tuple[bool, str, Any]:
    """Whether a value of some type is ours, the kind of its dtype, and its size."""
    is_float32 = jax_compat.is_plain_array(aval) and aval.dtype == np.float32
    kind = getattr(getattr(aval, "dtype", None), "kind", "O")
    return is_float32, kind, math.prod(getattr(aval, "shape", ()))


def is_smaller(size: Any, other: Any) -> bool:
    """Whether a number of elements is known to be smaller: of symbolic ones it may not be."""
    try:
        return bool(size < other)
    except InconclusiveDimensionOperation:
        return False


def movements(node: Node) -> Iterable[tuple[int, int]]:
    """Pairs of an operand and the result that it becomes, for a node that moves values.

    Where there are as many operands as results they go one by one (an ``optimization_barrier``);
    else it is the first operand that moves, and the others say where to (the indices of a
    ``gather``).
    """
    if len(node.ins) == len(node.outs):
        return zip(node.ins, node.outs, strict=True)
    return [(node.ins[0], out) for out in node.outs]


def sites_of(frame: Frame) -> Iterator[Node | Nest]:
    """Every equation of a jaxpr, nested ones after the one that holds them."""
    for site in frame.sites:
        yield site
        if isinstance(site, Nest):
            for inner in site.frames:
                yield from sites_of(inner)


def nodes_of(site: Node | Nest) -> Sequence[Node]:
    """The node itself, or all nodes of the jaxprs that an equation holds."""
    if isinstance(site, Node):
        return (site,)
    return [node for frame in site.frames for inner in frame.sites for node in nodes_of(inner)]
