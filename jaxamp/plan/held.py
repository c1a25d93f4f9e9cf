"""Which roundings XLA must not undo.

XLA may drop a narrowing that is followed by a widening. The wide value is then what it stores for
every reader that computes in f32, beside the narrow one for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxamp.formats import Precision, is_narrow
from jaxamp.plan.choose import Choice
from jaxamp.plan.graph import Graph, Node, Role


def find_held(
    graph: Graph, stored: Sequence[Precision | None], choices: Mapping[Node, Choice]
) -> frozenset[int]:
    """Values that are rounded from f32 arithmetic and read by f32 arithmetic."""
    return frozenset(
        value
        for node in graph.nodes
        if node.role is Role.ELEMENTWISE and choices[node].operand is Precision.F32
        for value in node.outs
        if is_narrow(stored[value])
        and any(choices[reader].operand is Precision.F32 for reader in graph.uses[value])
    )
