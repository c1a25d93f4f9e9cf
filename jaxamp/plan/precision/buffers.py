"""Round values before a loop stacks or slices them, or a branch joins them in memory.

This happens where all readers round them anyway: they get the same numbers, and half of the bytes
are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from jaxamp.core.formats import Precision
from jaxamp.plan.dataflow.dataflow import Dataflow
from jaxamp.plan.graph.graph import Graph, Link, Node, Role
from jaxamp.plan.precision.reader_precisions import Choices, ReaderPrecisions, forwarded

F32 = Precision.F32
_STACKED = (Link.STACK, Link.JOIN)
_CUT = (Link.SLICE, Link.INVARIANT)
_MADE = (Role.ELEMENTWISE, Role.MERGE)


def narrow_buffers(flow: Dataflow, stored: list[Precision | None], choices: Choices) -> None:
    """Store buffers narrow, in `stored`, where all their readers round them."""
    graph, uses = flow.graph, flow.uses
    links = [n for n in graph.named.get("", ()) if n.link in (*_STACKED, *_CUT)]
    if not links:
        return
    made = _find_computed(graph)
    buffers = {v for link in links for v in _buffers_of(flow, made, link) if stored[v] is F32}
    if not buffers:
        return
    wanted = ReaderPrecisions(graph, uses, stored, choices, (*_STACKED, *_CUT))
    narrowed: set[int] = set()
    for node in graph.nodes:
        for out in node.outs:
            if out in buffers and stored[out] is F32 and wanted[out] is not F32:
                narrowed.add(out)
                stored[out] = wanted[out]
        for source, out in forwarded(node, choices, _CUT):
            if source in narrowed:
                narrowed.add(out)
                stored[out] = stored[source]


def _find_computed(graph: Graph) -> set[int]:
    """Return the results of elementwise operations, and values these are moved to."""
    made: set[int] = set()
    for node in graph.nodes:
        if node.role in _MADE:
            made.update(node.outs)
        elif node.role is Role.MOVE:
            made.update(out for source, out in node.moves if source in made)
    return made


def _buffers_of(flow: Dataflow, made: Set[int], link: Node) -> Iterable[int]:
    """Return the buffers that a loop or branch allocates, and would not otherwise be stored.

    What is made of parameters alone is none that does not change: its cotangent is a gradient.
    """
    if link.link in _STACKED:
        return link.outs
    state, dense = flow.provenance.state, flow.provenance.dense
    return [
        v for v in link.ins if v in made and (link.link is Link.SLICE or dense[v] or not state[v])
    ]
