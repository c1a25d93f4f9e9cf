"""Find of which array each value is made, and which arrays products, sums and loops make of others.

An array that is moved, masked or scaled by known or smaller ones is the same array, and so is its
sum over an axis, or its slice in a loop. A product, and what a solver makes of one, is `linear` in
each of its operands.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

from jaxamp.core.taxonomy import Trait
from jaxamp.jaxprs.name_stack import is_backward
from jaxamp.plan.graph.consumers import ADDS, SCALES, closure, find_summed, is_square, reached
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, is_smaller
from jaxamp.plan.graph.sweeps import union

_NONE: frozenset[int] = frozenset()
ADDED = (*ADDS, "scatter-add", "scatter-sub")
SIGNS = ("neg", "abs", "select_n")
_LIMITS = ("max", "min", "clamp")
REDUCTIONS = ("reduce_sum", "psum", "psum_invariant")
_SCALED = frozenset((*SIGNS, *SCALES))
_TERMS = 8  # what a longer sum adds up counts as one: a residual stream is as long as a network


def chosen(node: Node) -> tuple[int, ...]:
    """Return the operands of a node but for what chooses among them."""
    return node.ins[1:] if node.name == "select_n" else node.ins


class Arrays:
    """Arrays of a program, and how they are made of each other."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.sizes = graph.sizes.copy()  # of values as they were before they were repeated
        self.origins = list(range(len(graph.avals)))  # per value, the array that it is
        self.whole = self.origins.copy()  # as `origins`, but a part or a sum is an array of its own
        self.is_sum = bytearray(len(graph.avals))  # per value, whether it is a sum over an axis
        # Per value, whether it is a negative multiple of its array.
        self.is_negative = bytearray(len(graph.avals))
        # Per value, the node that makes it; of what a loop carries, the one before the loop.
        self.makers: dict[int, Node] = {}
        self.linear: dict[int, frozenset[int]] = {}  # per product, the arrays that it multiplies
        self.added: dict[int, frozenset[int]] = {}  # per sum, its terms
        self.mixed: set[int] = set()  # sums of which some term, however early, is subtracted
        self.joined: dict[int, frozenset[int]] = {}  # per array that others are joined in, these
        # Per array that enters a loop, what it is in the next iteration.
        self.carried: dict[int, frozenset[int]] = {}
        self._made_of: dict[tuple[frozenset[int], bool], dict[int, bool]] = {}
        for node in graph.nodes:
            for out in node.outs:
                self.makers.setdefault(out, node)
            if node.role is Role.MOVE:
                for source, out in node.moves:
                    if is_smaller(self.sizes[source], self.sizes[out]):
                        self.sizes[out] = self.sizes[source]
                    self._follow(source, out, whole=not self._is_smaller(out, source))
            elif node.name in REDUCTIONS:
                for source, out in node.moves:
                    self._follow(source, out, whole=False)
                    self.is_sum[out] = 1
            elif node.link is Link.BACK:
                first, last = (self.origins[v] for v in (*node.outs, *node.ins))
                self.carried[first] = self.carried.get(first, _NONE) | {last}
            elif node.link is not None:
                self._follow(node.ins[0], node.outs[0])
            elif node.outs and node.ins:
                self._make(node, node.outs[0])

    def _follow(self, source: int, out: int, *, whole: bool = True) -> None:
        self.origins[out], self.is_sum[out] = self.origins[source], self.is_sum[source]
        self.is_negative[out] = self.is_negative[source]
        self.whole[out] = self.whole[source] if whole else out

    def _make(self, node: Node, out: int) -> None:
        if (summed := find_summed(self.graph, node)) is not None:
            self._follow(summed, out, whole=False)
            self.is_sum[out] = 1
        elif node.multiplies or node.role is Role.FIXED or self.is_outer(node):
            if not is_backward(node.scope):
                read = self.read(node)
                self.linear[out] = frozenset(read.union(*(self.joined.get(v, ()) for v in read)))
        elif node.name in ADDED:
            self.added[out] = read = frozenset(self.read(node))
            is_mixed = union(self.is_negative, node.ins) or not self.mixed.isdisjoint(read)
            if is_mixed or node.name.endswith("sub"):
                self.mixed.add(out)
        elif node.role is Role.MERGE:
            self.joined[out] = frozenset(self.read(node))
        elif node.name not in _SCALED or is_square(node):
            return
        elif (main := self.main(node)) is None:
            self.is_negative[out] = sum(self.is_negative[v] for v in node.ins) % 2
        else:
            known, (one, other) = self.graph.constants, (node.ins[0], node.ins[-1])
            number = 0.0 if node.name in SIGNS else known.get(one, known.get(other, 0.0))
            self._follow(main, out)
            self.is_negative[out] ^= node.name == "neg" or number < 0

    def read(self, node: Node) -> set[int]:
        """Return the arrays that a node reads."""
        return {self.origins[v] for v in node.ins}

    def product(self, value: int) -> Node | None:
        """Return the product of matrices that makes the array of a value, if one does."""
        node = self.makers.get(self.origins[value])
        return node if node and node.multiplies else None

    def is_outer(self, node: Node) -> bool:
        """Return whether elements of smaller arrays are multiplied by each other."""
        size = self.graph.sizes[node.outs[0]]
        return node.name == "mul" and all(is_smaller(self.sizes[v], size) for v in node.ins)

    def main(self, node: Node) -> int | None:
        """Return the operand that known or smaller numbers scale, or a mask, if there is one."""
        known = self.graph.constants
        read = [v for v in chosen(node) if v not in known and not self.is_mask(v)]
        for value in read:
            if all(self._is_smaller(v, value) for v in read if v != value):
                return value if node.name != "div" or value == node.ins[0] else None
        return None

    def is_mask(self, value: int) -> bool:
        """Return whether a value is a boolean array made a number."""
        node = self.makers.get(self.origins[value])
        if node is None or node.role is not Role.CONVERT:
            return False
        return self.graph.kinds[node.ins[0]] == "b"

    def _is_smaller(self, value: int, other: int) -> bool:
        return is_smaller(self.sizes[value], self.sizes[other])

    def path(self, value: int) -> Iterator[tuple[Node, int]]:
        """Yield the nodes that move and scale a value's array, last first, and what each reads."""
        while value != self.origins[value]:
            node = self.makers[value]
            source = next(v for v in node.ins if self.origins[v] == self.origins[value])
            yield node, source
            value = source

    def scales(self, value: int) -> set[int]:
        """Return what a value's array has been multiplied with or divided by."""
        scaled = (pair for pair in self.path(value) if pair[0].name in SCALES)
        return {self.origins[v] for node, source in scaled for v in node.ins if v != source}

    def is_whole_part(self, value: int, of: int) -> bool:
        """Return whether a value is another rounded to whole numbers, or to multiples of one."""

        def rounded(value: int) -> Sequence[int]:
            node = self.makers.get(value)
            read = [v for v in chosen(node) if v not in self.graph.constants] if node else []
            if node is None or node.name == "select_n":
                return read
            if node.name in SCALES:
                return [v for v in (self.main(node),) if v is not None]
            is_kept = node.role in (Role.MOVE, Role.CONVERT) or node.name in _LIMITS
            return read if is_kept and len(read) == 1 else ()

        nodes = (self.makers.get(v) for v in closure([value], rounded))
        whole = [n.ins[0] for n in nodes if n and n.trait is Trait.INTEGRAL]
        return any(self.origins[v] == self.origins[of] for v in whole)

    def is_linear(self, value: int, arrays: Collection[int], sums: bool = False) -> bool:
        """Return whether products, solvers, and sums if so said, make a value of some arrays."""
        first = min((self._first_made[v] for v in arrays if v in self._first_made), default=value)
        tables = (self.linear, self.added, self.carried) if sums else (self.linear,)
        known = self._made_of.setdefault((frozenset(arrays), sums), {})

        def read(value: int) -> Iterable[int]:
            # What is older than all of them is made of none, unless it changes in a loop.
            found = (v for table in tables for v in table.get(value, ()) if known.get(v, True))
            return [v for v in found if v >= first or v in arrays or (sums and v in self.carried)]

        others = list[int]()
        for made in reached(read(value), read):
            if made in arrays or made in known:
                known[value] = True
                return True
            others.append(made)
        known.update(dict.fromkeys(others, False))
        return False

    @functools.cached_property
    def _first_made(self) -> dict[int, int]:
        """Per array, the first one that is made of it."""
        found: dict[int, int] = {}
        made = (table.items() for table in (self.linear, self.added, self.carried))
        for out, read in itertools.chain(*made):
            found |= {v: min(out, found.get(v, out)) for v in read}
        return found

    def sums(self) -> Iterator[Node]:
        """Yield the nodes that add up arrays."""
        return (n for name in ADDED for n in self.graph.named.get(name, ()))

    @functools.cached_property
    def differences(self) -> list[tuple[int, int]]:
        """Arrays and what is subtracted from them, in sums of few terms."""
        return [(self.origins[a], self.origins[b]) for a, b in self._subtracted]

    @functools.cached_property
    def parted(self) -> set[int]:
        """Arrays of which parts are subtracted from others, or sums of parts, but no sum of all."""
        pairs = ((a, b) for a, b in self._subtracted if self.origins[a] == self.origins[b])
        is_sum, whole = self.is_sum, self.whole
        return {
            self.origins[a] for a, b in pairs if is_sum[a] == is_sum[b] and whole[a] != whole[b]
        }

    @functools.cached_property
    def _subtracted(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for node in self.sums():
            if node.outs[0] in self.mixed and not is_backward(node.scope):
                left, right = (self._added_up(v) for v in (node.ins[0], node.ins[-1]))
                flips = node.name.endswith("sub")
                for (a, s), (b, t) in itertools.product(left, right):
                    if s ^ t ^ flips:
                        found.append((b, a) if s else (a, b))
        return found

    def distances(self, products: Iterable[Node]) -> Iterator[tuple[int, int]]:
        """Yield arrays whose distances products make, in sums of few terms."""
        for node in products:
            left, right = ([self.origins[v] for v, _ in self._added_up(v)] for v in node.ins[:2])
            if left[0] != right[0]:
                yield from both_ways(itertools.product(left, right))

    def _added_up(self, value: int) -> list[tuple[int, int]]:
        """Return a value, and the nearest terms of its sum, each with its sign."""
        pending, terms = [(value, 0)], list[tuple[int, int]]()
        for made, sign in pending:
            sign ^= self.is_negative[made]
            terms.append((made, sign))
            node = self.makers.get(self.origins[made])
            if node and node.name in ADDED and not self.is_sum[made] and len(pending) < _TERMS:
                pending += [(node.ins[0], sign), (node.ins[-1], sign ^ node.name.endswith("sub"))]
        return terms


def both_ways(pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], None]:
    """Return pairs, and the same the other way round."""
    return dict.fromkeys(pair for a, b in pairs for pair in ((a, b), (b, a)))
