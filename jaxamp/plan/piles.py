"""Rounds what a loop stacks, slices or is handed, or a branch joins, before it is in memory.

It does so where all readers round it themselves: they get the same numbers, and half of the bytes
are written.
"""

from __future__ import annotations

from jaxamp.formats import Precision
from jaxamp.plan.graph import Graph, Link, Node, Role
from jaxamp.plan.wanted import Choices, find_wanted, handed_on

_PILED = (Link.STACK, Link.JOIN)
_CUT = (Link.SLICE, Link.INVARIANT)
_MADE = (Role.ELEMENTWISE, Role.MERGE)


def narrow_piles(graph: Graph, stored: list[Precision | None], choices: Choices) -> None:
    """Enters that what is stacked, joined or sliced is narrow, and so is what becomes of it.

    Args:
      graph: the program.
      stored: precision in which each value is stored; it is written to.
      choices: what was chosen for each node.
    """
    piles = {
        value
        for node in graph.nodes
        for value in node.outs
        if stored[value] is Precision.F32 and _is_pile(graph, node, value)
    }
    if not piles:
        return
    wanted = find_wanted(graph, stored, choices, (*_PILED, *_CUT))
    narrowed: set[int] = set()
    for node in graph.nodes:
        for out in node.outs:
            if out in piles and wanted[out] is not Precision.F32:
                narrowed.add(out)
                stored[out] = wanted[out]
        for source, out in handed_on(node, choices, _CUT):
            if source in narrowed:
                narrowed.add(out)
                stored[out] = stored[source]


def _is_pile(graph: Graph, node: Node, value: int) -> bool:
    """Whether a loop or branch puts the whole of a value into memory, where it else were not."""
    sliced = node.role in _MADE and any(r.link in _CUT for r in graph.uses[value])
    return node.link in _PILED or sliced
