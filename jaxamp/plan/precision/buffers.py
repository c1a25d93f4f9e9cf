"""Rounds what a loop stacks, slices or is handed, or a branch joins, before it is in memory.

It does so where all readers round it themselves: they get the same numbers, and half of the bytes
are written. What a loop slices is rounded for that loop alone where all other readers are fused.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from jaxamp.core.formats import Precision
from jaxamp.plan.dataflow.regions import Interior
from jaxamp.plan.dataflow.uses import Demand
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, movements
from jaxamp.plan.precision.reader_precisions import Choices, Wanted, handed_on

F32 = Precision.F32
_PILED = (Link.STACK, Link.JOIN)
_CUT = (Link.SLICE, Link.INVARIANT)
_MADE = (Role.ELEMENTWISE, Role.MERGE)


def narrow_piles(
    graph: Graph,
    demand: Demand,
    interior: Interior,
    stored: list[Precision | None],
    choices: Choices,
) -> None:
    """Enters that what is stacked, joined or sliced is narrow, and so is what becomes of it.

    Args:
      graph: the program.
      demand: what its values are for.
      interior: which of them are fused.
      stored: precision in which each value is stored; it is written to.
      choices: what was chosen for each node.
    """
    if graph.links.isdisjoint((*_PILED, *_CUT)):
        return
    links = [node for node in graph.nodes if node.link in (*_PILED, *_CUT)]
    made = _made_here(graph)
    piles = {v for link in links for v in _put_in_memory(made, link) if stored[v] is F32}
    if not piles:
        return
    wanted = Wanted(graph, demand, stored, choices, (*_PILED, *_CUT))
    sliced = [n for n in links if n.link is Link.SLICE and n.ins[0] in piles]
    piles.update(n.outs[0] for n in sliced if _is_fused(interior, wanted, n.ins[0]))
    narrowed: set[int] = set()
    for node in graph.nodes:
        for out in node.outs:
            if out in piles and stored[out] is F32 and wanted[out] is not F32:
                narrowed.add(out)
                stored[out] = wanted[out]
        for source, out in handed_on(node, choices, _CUT):
            if source in narrowed:
                narrowed.add(out)
                stored[out] = stored[source]


def _made_here(graph: Graph) -> set[int]:
    """What elementwise operations make, and what that is moved to."""
    made: set[int] = set()
    for node in graph.nodes:
        if node.role in _MADE:
            made.update(node.outs)
        elif node.role is Role.MOVE:
            made.update(out for source, out in movements(node) if source in made)
    return made


def _put_in_memory(made: Set[int], link: Node) -> Iterable[int]:
    """What a loop or branch puts into memory as a whole, where it else were not."""
    return link.outs if link.link in _PILED else [v for v in link.ins if v in made]


def _is_fused(interior: Interior, wanted: Wanted, value: int) -> bool:
    """Whether all that takes a value in f32 is fused with what makes it."""
    far = [r for r in wanted.graph.uses[value] if interior.is_far(value, r)]
    return bool(interior.fused[value]) and F32 not in wanted.taken(value, far)
