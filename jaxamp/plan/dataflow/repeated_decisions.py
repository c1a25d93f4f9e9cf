"""Find products that repeat one that decides when a loop stops, as the derivative of a solver does.

A loop that is differentiated makes its steps again, a checkpoint later or in a rule of its own, and
then only counts them. A step that was accepted has to be accepted, and to be as long as it was.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from jax.extend.core import JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.plan.dataflow.uses import Uses
from jaxamp.plan.graph.graph import Graph, Node, Role


def place_of(eqn: JaxprEqn) -> Hashable:
    """Return what an equation and its repetition share, and its transpose does not."""
    operands = tuple(str(v.aval) for v in eqn.invars)
    numbers = str(eqn.params.get("dimension_numbers"))
    return jax_compat.user_line(eqn.source_info), operands, numbers


def find_repeated(graph: Graph, uses: Uses) -> frozenset[int]:
    """Return the results of products that repeat one that decides when a loop stops."""
    deciding = set(graph.deciding)
    others = list[Node]()
    for node in _products(graph.nodes):
        if any(uses.stops_loop[v] for v in node.outs):
            deciding.add(place_of(node.eqn))
        else:
            others.append(node)
    if not deciding:
        return frozenset()
    return frozenset(v for node in others if place_of(node.eqn) in deciding for v in node.outs)


def _products(nodes: Iterable[Node]) -> Iterator[Node]:
    return (node for node in nodes if node.role is Role.CONTRACT)
