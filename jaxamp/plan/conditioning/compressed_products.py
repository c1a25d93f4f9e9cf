"""Products of which a logarithm or a root is taken: that fits into float16 where they do not.

A sigmoid of an infinity is as good as of a large number; a logarithm or a root is infinite itself.
"""

from __future__ import annotations

from jaxamp.plan.graph.consumers import descendants
from jaxamp.plan.graph.graph import Graph, Node, Role


def is_compressed(graph: Graph, value: int) -> bool:
    """Whether such a function takes a value, or what it is moved to or shifted by a number."""
    near = descendants(graph, value, lambda node: _keeps(graph, node))
    return any(reader.name in _COMPRESSING for v in near for reader in graph.readers[v])


_COMPRESSING = frozenset({"log", "log1p", "sqrt", "cbrt", "asinh"})
_SHIFTS = frozenset({"add", "sub", "max", "min", "abs"})


def _keeps(graph: Graph, node: Node) -> bool:
    if node.role is Role.MOVE:
        return True
    others = [v for v in node.ins if v in graph.constants]
    return node.name in _SHIFTS and len(node.ins) - len(others) == 1
