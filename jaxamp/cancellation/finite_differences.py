"""Find products that make slopes: differences of what is computed alike of places near each other.

`(f(x + h) - f(x - h)) / (2 * h)` of a small `h` that the program says, of `h * v`, of a `v` that is
both added and subtracted, of an `h` that divides the difference, or `f(1.01 * x) - f(x)`. The ends
may be in one array, of which parts are subtracted: `f(x[:, None] + h * stencil)`, or `f` of places
that are joined.

Values have numbers, equal where the same is computed, and others, equal where it is computed alike:
there what moves an array a little has the number of that array.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Set

from jaxamp.cancellation.arrays import Arrays
from jaxamp.core.intervals import magnitude
from jaxamp.core.taxonomy import Trait
from jaxamp.jaxprs.contracted import size
from jaxamp.jaxprs.hashing import params_key
from jaxamp.jaxprs.name_stack import is_backward
from jaxamp.plan.dataflow.exact import factor
from jaxamp.plan.dataflow.known_values import KnownValues
from jaxamp.plan.graph.consumers import SCALES, is_square, reached
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, is_smaller

_NEAR, _STEP, _SAME = 1 / 8, 1 / 32, 1e-5  # how far places of a slope are apart, or the same

_WEIGHING = ("mul", "dot_general")


def find_slopes(
    arrays: Arrays, known: KnownValues, parted: Set[int], weighs: Callable[[Node], bool]
) -> set[Node]:
    """Return the products that make the ends of slopes.

    `parted` are arrays of which products subtract parts; `weighs` tells whether a node multiplies
    by known numbers that add up to little or nothing.
    """
    steps = _Steps(arrays, known)
    near, makers = _made_of(arrays.graph, steps.moved), arrays.makers
    pairs = [pair for pair in arrays.differences if not near.isdisjoint(pair)]
    pairs = [
        (a, b) for a, b in pairs if {a, b} <= makers.keys() and makers[a].name == makers[b].name
    ]
    parted = (parted | arrays.parted) & near
    joins = (n for n in arrays.graph.named.get("concatenate", ()) if not near.isdisjoint(n.ins))
    if not (pairs or parted or steps.spread or any(map(_joins, joins))):
        return set()
    places = _Places(arrays, steps, near)
    ends = {v for pair in pairs if places.are_near(*pair) for v in pair} | parted & places.spread
    found, named = set[Node](), arrays.graph.named
    for node in (n for name in _WEIGHING if places.spread for n in named.get(name, ())):
        is_spread = not places.spread.isdisjoint(node.ins)
        if is_spread and not is_backward(node.scope) and weighs(node):
            ends.update(node.ins)
            found.add(node)
    return found | places.products(ends)


def _made_of(graph: Graph, moved: Iterable[int]) -> set[int]:
    """Return some values, and all that is made of them."""
    made = {*moved}
    for node in graph.nodes if made else ():
        if not made.isdisjoint(node.ins):
            made.update(node.outs)
    return made


class _Steps:
    """Sums and multiples that move arrays a little.

    Attributes:
      moved: per sum, or multiple by a number near one, the array that is moved.
      spread: sums that move one array to several places.
    """

    def __init__(self, arrays: Arrays, known: KnownValues) -> None:
        self._arrays, self._graph, self._known = arrays, arrays.graph, known
        self._dividing = {*_dividing(arrays)}
        self._small = self._find_small()
        self._layers = {v for v in arrays.linear if v not in self._small} - self._graph.factors
        added = arrays.added.items()
        self._layers.update(out for out, read in added if not self._layers.isdisjoint(read))
        self.moved, self.spread = dict(_near_one(self._graph)), set[int]()
        sums = [(n, n.ins[0], n.ins[-1]) for n in arrays.sums()]
        signs = {self._sign(*one) for one in sums}
        for node, *ends in sums:
            for value, by in ends, ends[::-1]:
                *pair, sign = self._sign(node, value, by)
                is_both = (*pair, not sign) in signs and self._is_free(value, by)
                if is_both or self._is_step(by):
                    self.moved[node.outs[0]] = value
                    if self._is_spread(node, value, by):
                        self.spread.add(node.outs[0])

    def _sign(self, node: Node, value: int, by: int) -> tuple[int, int, bool]:
        origins, is_negative = self._arrays.origins, self._arrays.is_negative[by]
        return origins[value], origins[by], bool(is_negative) ^ node.name.endswith("sub")

    def _is_step(self, by: int) -> bool:
        """Return whether a value is known and small, or a small multiple, and not of a layer."""
        if by in self._small:  # of a layer, it is a solver's
            return self._arrays.origins[by] not in self._layers
        is_small = _SAME < magnitude(self._graph.ranges[by]).high < _NEAR
        return is_small and (by in self._graph.constants or self._is_known(by))

    def _is_free(self, value: int, by: int) -> bool:
        """Return whether what is added and subtracted is neither known, a layer's nor the array."""
        one, other = self._arrays.origins[value], self._arrays.origins[by]
        is_own = other == one or other in self._layers
        return not is_own and self._graph.constants.keys().isdisjoint((by, other))

    def _is_known(self, value: int) -> bool:
        return any(map(self._known.has, (value, self._arrays.origins[value])))

    def _is_spread(self, node: Node, value: int, by: int) -> bool:
        """Return whether a sum moves one array by several known steps, or by both signs of one."""
        arrays, graph, origin = self._arrays, self._graph, self._arrays.origins[by]
        is_known = by in graph.constants or self._is_known(by) or origin in self._dividing
        if value in graph.constants or not (is_known or _has_both_signs(arrays, origin)):
            return False
        low, high = graph.ranges[by]
        if any(node.link is Link.SLICE for node, _ in arrays.path(by)):
            return low < 0 < high
        is_repeated = is_smaller(arrays.sizes[value], graph.sizes[node.outs[0]])
        return is_repeated and is_smaller(1, arrays.sizes[by])

    def _find_small(self) -> set[int]:
        """Return the multiples of arrays by a small known number, whatever divides that, as a norm.

        And those by a scale that divides a difference.
        """
        arrays, found = self._arrays, set[int]()
        for value, node in arrays.makers.items():
            if not found and node.name not in SCALES:
                continue
            if value != arrays.origins[value]:
                node, source = next(arrays.path(value))
            elif value in arrays.linear and node.name == "mul":
                # Of several known numbers and an array.
                source = node.ins[node.ins[0] in self._graph.constants]
            else:
                continue
            if source in found or self._is_small(node, source):
                found.add(value)
        return found

    def _is_small(self, node: Node, source: int) -> bool:
        if node.name not in SCALES:
            return False
        arrays, graph = self._arrays, self._graph
        by = [arrays.origins[v] for v in node.ins if v != source]
        if not self._dividing.isdisjoint((arrays.origins[source], *by)):
            return True
        scales = [n for v in by if (n := arrays.makers.get(v)) and n.name in SCALES]
        numbers = [factor(graph, source, node)]
        numbers += [graph.constants.get(v) for n in scales for v in n.ins]
        small = [abs(n) for n in numbers if n is not None and _SAME < abs(n) < _STEP]
        return bool(small) and min(small) * self._terms(source) < 1 - _NEAR  # a mean is large

    def _terms(self, source: int) -> float:
        """Return how many numbers each element of a sum along axes adds up; else one."""
        avals = self._graph.avals
        for node, value in self._arrays.path(source) if self._arrays.is_sum[source] else ():
            if node.role is not Role.MOVE and node.name not in SCALES:
                return size(avals[value]) / max(size(avals[node.outs[0]]), 1)
        return 1


def _near_one(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield the multiples of arrays by numbers near one, each with the array."""
    for node in (n for name in SCALES for n in graph.named.get(name, ())):
        for value in () if graph.constants.keys().isdisjoint(node.ins) else node.ins:
            number = factor(graph, value, node)
            if number is not None and _SAME < abs(number - 1) < _NEAR:
                yield node.outs[0], value


def _dividing(arrays: Arrays) -> Iterator[int]:
    """Yield the scales that no number says and that divide differences, or their squares do."""
    for node in arrays.graph.named.get("div", ()):
        one, other = (arrays.origins[v] for v in node.ins)
        parts = {one} | arrays.joined.get(one, frozenset())
        if arrays.mixed.isdisjoint(parts):
            continue
        scales, maker = {other}, arrays.makers.get(other)
        if maker and (maker.name in SCALES or is_square(maker)):
            scales |= arrays.read(maker)
        for scale in scales:
            if arrays.graph.sizes[scale] == 1 and scale not in arrays.graph.constants:
                yield scale


def _has_both_signs(arrays: Arrays, value: int) -> bool:
    """Return whether an array joins another and its negative."""
    node = arrays.makers.get(value)
    if node is None or node.role is not Role.MERGE or len(arrays.joined[value]) > 1:
        return False
    return len({arrays.is_negative[v] for v in node.ins}) > 1


class _Places:
    """Numbers of values, and which are made of moved places."""

    def __init__(self, arrays: Arrays, steps: _Steps, near: set[int]) -> None:
        graph, self._arrays, self._steps, self._near = arrays.graph, arrays, steps, near
        self._same, self._alike = ([*range(len(graph.avals))] for _ in range(2))
        self.spread = set[int]()  # what is made of several places in one array
        numbers = dict[float, int]()
        for value, number in graph.constants.items():
            if graph.sizes[value] == 1:
                self._same[value] = self._alike[value] = numbers.setdefault(number, value)
        keys = dict[Hashable, int](), dict[Hashable, int]()
        for node in graph.nodes:
            if node.link is Link.BACK:
                continue
            if not self.spread.isdisjoint(node.ins):
                self.spread.update(node.outs)
            is_part = node.trait is Trait.PART or not node.ins
            if not is_part and (node.role is Role.MOVE or node.link not in (None, Link.JOIN)):
                for source, out in node.moves:
                    self._same[out], self._alike[out] = self._same[source], self._alike[source]
            else:
                self._number(node, keys, params_key(node.eqn.params) if is_part else None)

    def _number(self, node: Node, keys: tuple[dict[Hashable, int], ...], how: Hashable) -> None:
        for place, out in enumerate(node.outs):
            same, alike = (tuple(of[v] for v in node.ins) for of in (self._same, self._alike))
            key = node.name, node.link, place
            self._same[out] = keys[0].setdefault((*key, how, same), out)
            if out in self._steps.moved:
                self._alike[out] = self._alike[self._steps.moved[out]]
                self.spread.update({out} & self._steps.spread)
            elif _joins(node) and len({*alike}) == 1 < len({*same}):
                self._alike[out] = alike[0]
                self.spread.add(out)
            else:
                how = None if out in self.spread else how  # parts of such an array are alike
                self._alike[out] = keys[1].setdefault((*key, how, alike), out)

    def are_near(self, one: int, other: int) -> bool:
        """Return whether two arrays are computed alike of places that are not the same."""
        return self._alike[one] == self._alike[other] and self._same[one] != self._same[other]

    def products(self, ends: Iterable[int]) -> set[Node]:
        """Return the products that make some arrays of moved places, and all made alike."""

        def made_of(value: int) -> Iterable[int]:
            node = self._arrays.makers.get(value)
            if node is None or value in self._steps.moved:
                return ()
            return [v for v in node.ins if v in self._near]

        alike = {self._alike[v] for v in reached((v for v in ends if v in self._near), made_of)}
        return {n for n in self._arrays.graph.products if self._alike[n.outs[0]] in alike}


def _joins(node: Node) -> bool:
    """Return whether a node joins arrays along an axis other than that of features, the last."""
    if node.name != "concatenate":
        return False
    axis, rank = node.eqn.params["dimension"], len(node.eqn.outvars[0].aval.shape)
    return axis < rank - 1 or rank == 1
