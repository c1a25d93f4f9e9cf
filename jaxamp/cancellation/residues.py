"""Find products of which a residue is needed: a part of a turn, a distance to a known number.

The phase of a wave, and a fraction, are needed to a part of a turn, however many turns there are.
A likeness of normalized arrays is near one where they are near each other: `1 - x @ y.T` leaves
their distance, and so does its arc. What is subtracted from an array that a product multiplies,
or multiplied by a diagonal matrix less another, is a difference too: see `remainders.py`.

How large a phase is, or how alike arrays are, no program says. If a layer makes them, as in a
network of sines, the product stays float32 only where all such products are a small part of the
program's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from jaxamp.cancellation.arrays import Arrays, chosen
from jaxamp.cancellation.remainders import find_remainders
from jaxamp.cancellation.squares import Squares
from jaxamp.core.guards import Guard
from jaxamp.jaxprs.contracted import size, terms
from jaxamp.jaxprs.name_stack import is_backward
from jaxamp.plan.dataflow.constraints import Constraint
from jaxamp.plan.dataflow.known_values import KnownValues
from jaxamp.plan.graph.consumers import SCALES
from jaxamp.plan.graph.graph import Graph, Node, Role
from jaxamp.plan.graph.sweeps import backward, forward, mark, union

PHASE = Constraint("the phase of a periodic function", Guard.SENSITIVE)
LIKENESS = Constraint("where arrays are alike, a known number nearly cancels it", Guard.SENSITIVE)
REMAINDER = Constraint("leaves a difference of what it multiplies", Guard.SENSITIVE)

_TURN = 1  # only a part of a turn is needed
_NEAR = 2  # it is subtracted from a known number, or that from it
_ALIKE = 4  # it is so once it is divided by norms, or its arc is taken
_REST = 8  # it is subtracted from a known number: a distance, where no layer makes it
_PART = 16  # its whole part is subtracted, which layers that say places have too
Left = Mapping[Node, Sequence[tuple[int, int]]]
_NORM, _NORMED = 1, 2  # a root of a sum of squares; an array that is divided by one

_SMALL = 8  # what is a smaller part of the arithmetic than one in so many is not missed
_ARCS = ("acos", "asin", "acosh", "atanh")
_ROOTS = ("sqrt", "rsqrt", "pow")
_LEAVING = (*_ARCS, "exp", "sub")
_SCALED = (*SCALES, "neg", "abs", "max", "min", "clamp", "select_n", "square", "integer_pow")


def find_residues(
    arrays: Arrays,
    products: Sequence[Node],
    squares: Squares,
    cancelled: Collection[Node],
    known: KnownValues,
) -> dict[Node, Constraint]:
    """Return the products of a forward pass of which a residue is needed, each with why."""
    graph = arrays.graph
    products = [n for n in products if not is_backward(n.scope)]
    remainders = find_remainders(arrays, products, cancelled, known)
    leaving = [n for n in graph.nodes if n.name in _LEAVING or n.semantics.periodic]
    left = {node: found for node in leaving if (found := [*_left(arrays, node)])}
    norms = _norms(graph, squares)
    needs = _needs(arrays, norms, left)
    needed = [n for n in products if n in remainders or needs[n.outs[0]]]
    if not needed:
        return {}

    def is_layer(node: Node) -> bool:
        is_wide = node in remainders or node in cancelled
        return node.multiplies and not is_wide and not any(map(known.is_made, node.ins))

    made = _made(graph, is_layer)
    of_layers = {n for n in needed if union(made, remainders.get(n, n.ins))}
    found = dict[Node, Constraint]()
    for node in needed:
        need = needs[node.outs[0]]
        is_normed = all(norms[v] & _NORMED for v in node.ins[:2])
        is_given = node not in of_layers
        if need & (_TURN | is_given * _PART):
            found[node] = PHASE
        elif need & (_ALIKE | is_normed * _NEAR | is_given * _REST):
            found[node] = LIKENESS
        elif node in remainders:
            found[node] = REMAINDER
    unsure = of_layers & {*found}
    if unsure and _work(graph, unsure) * _SMALL > _work(graph, products):
        return {n: why for n, why in found.items() if n not in unsure}
    return found


def _needs(arrays: Arrays, norms: bytearray, left: Left) -> bytearray:
    """Sweep backward from what leaves a residue: return, per value, what is needed of it."""
    graph = arrays.graph
    bits = bytearray(len(graph.avals))
    for node in backward(graph, bits):
        for value, flags in left.get(node, ()):
            bits[value] |= flags
        given = union(bits, node.outs)
        if not given:
            continue
        if node.role is Role.MOVE:
            for source, out in node.moves:
                bits[source] |= bits[out]
        elif node.link is not None or node.role is Role.MERGE:
            mark(bits, node.ins, given)
        else:
            linear = node.ins if node.name == "complex" else filter(node.is_linear_in, node.ins)
            mark(bits, linear, given & (_TURN | _PART))
        if node.name in SCALES and union(norms, node.ins) & _NORM and given & _NEAR:
            mark(bits, node.ins, given | _ALIKE)
        elif node.name in _SCALED and (main := arrays.main(node)) is not None:
            bits[main] |= given
    return bits


def _left(arrays: Arrays, node: Node) -> Iterator[tuple[int, int]]:
    """Yield the operands of which a node leaves a residue, each with what is needed of it."""
    graph = arrays.graph
    if _is_periodic(graph, node):
        yield node.ins[0], _TURN
    elif node.name in _ARCS:
        yield node.ins[0], _ALIKE
    elif node.name == "sub" and not graph.constants.keys() >= {*node.ins}:
        one, other = node.ins
        if _is_number(graph, one):
            yield other, _NEAR | _REST
        elif _is_number(graph, other):
            yield one, _NEAR
        elif arrays.is_whole_part(other, one):
            yield one, _PART


def _is_number(graph: Graph, value: int) -> bool:
    """Return whether a value repeats one known number other than zero, and is no captured array."""
    return bool(graph.constants.get(value)) and graph.sizes[graph.origin(value)] == 1


def _norms(graph: Graph, squares: Squares) -> bytearray:
    """Return, per value, whether it is a norm, or what has been divided by one."""
    norms = bytearray(len(graph.avals))
    for node in graph.nodes:
        if node.role is Role.MOVE or node.link is not None:
            for source, out in node.moves:
                norms[out] = norms[source]
        elif node.name in _ROOTS:
            norms[node.outs[0]] = _NORM * squares.has_sums(node.ins[0])
        elif not union(norms, node.ins):
            continue
        elif node.multiplies:
            norms[node.outs[0]] = _NORMED * all(norms[v] & _NORMED for v in node.ins[:2])
        elif node.name in _SCALED or node.name == "add":
            read = [v for v in chosen(node) if v not in graph.constants]
            kinds = {norms[v] for v in read}
            if len(read) == 1:
                norms[node.outs[0]] = norms[read[0]]
            elif node.name in SCALES and _NORM in kinds:
                norms[node.outs[0]] = _NORM if kinds == {_NORM} else _NORMED
    return norms


def _made(graph: Graph, is_layer: Callable[[Node], bool]) -> bytearray:
    """Return, per value, whether a layer has made it."""
    made = bytearray(len(graph.avals))
    mark(made, graph.activations, 1)
    for node in forward(graph, made):
        if is_layer(node) or (node.role is not Role.FIXED and union(made, node.ins)):
            mark(made, node.outs, 1)
    return made


def _is_periodic(graph: Graph, node: Node) -> bool:
    is_wave = node.name == "exp" and graph.kinds[node.outs[0]] == "c"
    return is_wave or (node.semantics.periodic and graph.kinds[node.outs[0]] == "f")


def _work(graph: Graph, nodes: Iterable[Node]) -> int:
    """Return how many numbers some products multiply."""
    read = ((n, [graph.avals[v] for v in n.ins]) for n in nodes)
    return sum(
        size(graph.avals[n.outs[0]]) * (terms(n.name, n.eqn.params, avals) or 0)
        for n, avals in read
    )
