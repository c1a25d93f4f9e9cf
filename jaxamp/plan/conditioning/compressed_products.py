"""Find products that are read through a logarithm or root, which fits into float16.

The product itself may overflow float16. A sigmoid of infinity is as good as that of a large number,
but a logarithm or root of infinity is infinite.
"""

from __future__ import annotations

from jaxamp.plan.graph.consumers import descendants
from jaxamp.plan.graph.graph import Graph, Node, Role


def is_compressed(graph: Graph, value: int) -> bool:
    """Return whether a logarithm or root is taken of a value, possibly moved or shifted before."""
    near = descendants(graph, value, lambda node: _keeps(graph, node))
    return any(reader.name in _COMPRESSING for v in near for reader in graph.readers[v])


_COMPRESSING = frozenset({"log", "log1p", "sqrt", "cbrt", "asinh"})
_SHIFTS = frozenset({"add", "sub", "max", "min", "abs"})


def _keeps(graph: Graph, node: Node) -> bool:
    if node.role is Role.MOVE:
        return True
    others = [v for v in node.ins if v in graph.constants]
    return node.name in _SHIFTS and len(node.ins) - len(others) == 1
