"""Find products that fit into float16 only after a later operation: a factor, a root, a quotient.

The product itself may overflow float16 where what is read of it does not. A sigmoid of infinity is
as good as that of a large number, but a logarithm or root of infinity is infinite, its reciprocal
is zero, and an attention that is normalized after its product with V is infinite. There dividend
and divisor are sums of the same terms. The derivative of a norm or softmax divides a cotangent,
which is none of them.
"""

from __future__ import annotations

from collections.abc import Set

from jaxamp.plan.dataflow.exact import factor
from jaxamp.plan.dataflow.uses import Uses
from jaxamp.plan.graph.consumers import (
    SCALES,
    Parts,
    descendants,
    find_origins,
    find_parts,
    is_movement,
    is_square,
)
from jaxamp.plan.graph.graph import Graph, Link, Node, Role

_NONE: frozenset[int] = frozenset()
FUSED = (Role.ELEMENTWISE, Role.MOVE, Role.REDUCE, Role.MERGE)
_SIGNS = frozenset({"neg", "sub"})
_SHIFTS = frozenset({"add", "sub", "max", "min", "abs"})
_KEEPING = (*SCALES, "square", "integer_pow", "sqrt")
_COMPRESSING = frozenset({"log", "log1p", "sqrt", "rsqrt", "cbrt", "asinh"})


def find_rescaled_products(graph: Graph, uses: Uses) -> frozenset[int]:
    """Return results of contractions that are scaled down, compressed or divided by a sum.

    And what is made of those that are scaled down, before they are.
    """
    terms = _find_terms(graph)
    found: set[int] = set()
    for out in (v for n in graph.products if n.role is Role.CONTRACT for v in n.outs):
        found |= _find_unscaled(graph, uses, out)
        if _is_compressed(graph, out) or _is_in_quotient(graph, terms, out):
            found.add(out)
    return frozenset(found)


def _find_unscaled(graph: Graph, uses: Uses, value: int) -> Set[int]:
    """Return a value, and what is made of it until known numbers below one together multiply it.

    None if that is not so on each way to a product. On other ways, such as that to a loss, it is
    float32 anyway.
    """
    ways, scales, scaled = [(value, 1.0)], dict[int, float](), False
    for read, scale in ways:
        if scale <= scales.get(read, 0):  # a way of a larger factor leads here
            continue
        scales[read] = scale
        for reader in graph.readers[read]:
            if not any(uses.reaches[v] for v in reader.outs):
                continue
            by = 1.0 if reader.name in _SIGNS else factor(graph, read, reader)
            if by is None:
                return _NONE
            if abs(scale * by) < 1:
                scaled = True
            else:
                ways += [(v, abs(scale * by)) for v in reader.outs]
    return scales.keys() if scaled else _NONE


def _is_compressed(graph: Graph, value: int) -> bool:
    """Return whether a logarithm, root or reciprocal is taken of a value, shifted or scaled or not.

    What divides itself, as in `y / (1 + abs(y))`, is stored however large it is.
    """
    near = descendants(graph, value, lambda node: _shifts(graph, node))
    readers = [(r, v) for v in near for r in graph.readers[v]]
    divided = [r.ins[0] in near for r, v in readers if r.name == "div" and r.ins[1] == v]
    return (bool(divided) and not any(divided)) or any(r.name in _COMPRESSING for r, _ in readers)


def _is_in_quotient(graph: Graph, terms: Parts, value: int) -> bool:
    """Return whether a value is dividend or divisor beside another sum of the same terms.

    One that is computed from the value itself, as its norm is, is no other sum: the value is stored
    however large it is.
    """
    readers = (r for v in descendants(graph, value, is_movement) for r in graph.readers[v])
    quotients = [
        r
        for r in readers
        if r.name == "div" and not terms.get(r.ins[0], _NONE).isdisjoint(terms.get(r.ins[1], _NONE))
    ]
    if not quotients:
        return False
    made = set(descendants(graph, value, lambda node: node.role in FUSED))
    return any(not made.issuperset(r.ins) for r in quotients)


def _find_terms(graph: Graph) -> Parts:
    """Return what each value is a sum of: the values that are summed, unmoved and unscaled."""
    if not any(graph.constants.keys().isdisjoint(n.ins) for n in graph.named.get("div", ())):
        return {}
    origins = find_origins(graph, lambda node: node.name in SCALES or is_square(node))

    def summed(node: Node) -> list[int] | None:
        is_sum = node.role is Role.CONTRACT or node.name == "reduce_sum"
        return [origins.get(v, v) for v in node.ins] if is_sum else None

    return find_parts(graph, summed, lambda n: _shifts(graph, n) or n.name in _KEEPING)


def _shifts(graph: Graph, node: Node) -> bool:
    """Return whether a node moves one value, or shifts or scales it by a known number."""
    if node.role is Role.MOVE or node.link is Link.JOIN:  # `jnp.diag` chooses by the platform
        return True
    others = [v for v in node.ins if v in graph.constants]
    return node.name in (*_SHIFTS, *SCALES) and len(node.ins) - len(others) == 1
