"""Enter products that features keep from being rounded, and those of known numbers."""

from __future__ import annotations

from jaxamp.core import features
from jaxamp.jaxprs.name_stack import is_backward
from jaxamp.plan.dataflow.known_values import KnownValues
from jaxamp.plan.graph.consumers import closure
from jaxamp.plan.graph.graph import Graph


def enter_products(graph: Graph) -> None:
    """Enter products that are not to be rounded, what these read, and products of known numbers."""
    known = KnownValues(graph)
    for work in features.works():
        graph.precise |= work.keep(graph, known) if work.keep else {}
    made = (n for n in graph.products if all(map(known.is_made, n.ins)))
    graph.written.update(n.outs[0] for n in made if not is_backward(n.scope))
    read, moved = (v for node in graph.precise for v in node.ins), graph.moved_from
    graph.unrounded.update(closure(read, lambda v: (moved[v],) if v in moved else ()))
