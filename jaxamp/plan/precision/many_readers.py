"""Find narrow values that many products read, so that their cotangents are summed in float32.

A loop adds up the cotangents of what it does not change in float32, and a written-out loop is no
worse: one kernel in twenty products of an iteration, the tokens that every layer of a decoder
attends to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxamp.core.formats import Precision, is_narrow
from jaxamp.plan.dataflow.layer_roles import is_backward
from jaxamp.plan.dataflow.regions import FusionRegions
from jaxamp.plan.graph.graph import Graph, Node, Role

# JAX rounds a sum of n cotangents n - 1 times: of four, no more often than a hand that is right.
_MANY = 5


def find_many_readers(
    graph: Graph,
    regions: FusionRegions,
    copies: Mapping[int, Precision],
    stored: Sequence[Precision | None],
) -> dict[int, frozenset[Node]]:
    """Return the readers of the narrow form of each value that has many of them.

    Readers of a backward pass do not count: nothing differentiates them.
    """
    found = {}
    for value, readers in enumerate(graph.readers):
        if len(readers) >= _MANY and is_narrow(copies.get(value, stored[value])):
            narrow = [r for r in readers if _reads_narrow(r) and not is_backward(r.scope)]
            if value in copies:
                narrow = [r for r in narrow if regions.is_far(value, r)]
            if len(narrow) >= _MANY:
                found[value] = frozenset(narrow)
    return found


def _reads_narrow(reader: Node) -> bool:
    return reader.role in (Role.CONTRACT, Role.MOVE)
