"""Find logits that are larger than their operands and read only relative to their maximum.

The logits of a large vocabulary: a loss subtracts each row's maximum before it sums anything. No
later Compute reads them, so that arithmetic gains nothing from a narrow format; memory does. They
are the largest array of the program, written once and read in each direction, and one rounding of
them is no more than what attention scores tolerate.
"""

from __future__ import annotations

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.graph.consumers import closure, read_for_results
from jaxamp.plan.graph.graph import Graph, Link, Node, is_smaller
from jaxamp.plan.graph.sweeps import backward, mark, union


def outweighs_operands(graph: Graph, node: Node) -> bool:
    """Return whether a contraction's result is known to be larger than its operands together.

    What is the same in each iteration of a loop, as the matrix of a loss in chunks, is none of
    these: the results of all iterations together are compared with it outside.
    """
    invariants = {link.outs[0] for link in graph.named.get("", ()) if link.link is Link.INVARIANT}
    own = [v for v in node.ins if graph.origin(v) not in invariants]
    return is_smaller(sum(graph.sizes[v] for v in own), graph.sizes[node.outs[0]])


def _maps(node: Node) -> bool:
    return node.is_elementwise and node.trait is not Trait.SENSITIVE


def find_compared(graph: Graph) -> bytearray:
    """Return per value whether an extremum is taken of it, as it is mapped elementwise."""
    found = bytearray(len(graph.avals))
    for node in backward(graph, found):
        if node.trait is Trait.EXTREMUM or (union(found, node.outs) and _maps(node)):
            mark(found, node.ins, 1)
    return found


def is_shift_invariant(graph: Graph, value: int) -> bool:
    """Return whether a value is read only for its extremes and for its distance to them.

    Before, it may be moved, scaled, masked or mapped elementwise.
    """

    def made(value: int) -> list[int]:
        reading = (n for n in graph.readers[value] if _maps(n) or n.trait is Trait.EXTREMUM)
        return [out for n in reading for out in n.outs]

    rows, extremes = {value}, set[int]()  # the value as it is mapped elementwise; its extremes
    shifted = False
    readers = {n for v in closure([value], made) for n in graph.readers[v]}
    for node in sorted(readers, key=lambda n: n.index):
        reads_rows, reads_extremes = (not group.isdisjoint(node.ins) for group in (rows, extremes))
        if reads_rows and reads_extremes and node.name == "sub":
            shifted = True
        elif node.trait is Trait.EXTREMUM and (reads_rows or reads_extremes):
            extremes.update(node.outs)
        elif _maps(node):
            for out, read in read_for_results(node):
                if not rows.isdisjoint(read):
                    rows.add(out)
                elif not extremes.isdisjoint(read):
                    extremes.add(out)
        elif reads_rows:
            return False
    return shifted and rows.isdisjoint(graph.outputs | graph.onward)
