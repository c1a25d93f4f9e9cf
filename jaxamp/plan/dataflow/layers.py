"""Find the position of a dot among the layers of a network: first, last or between."""

from __future__ import annotations

from jaxamp.plan.dataflow.layer_roles import Flow, Flows, is_backward
from jaxamp.plan.graph.graph import Graph, Node, Role

_MIDDLE = 3  # a shorter chain has no layer between its ends: it is a part of a network


class Layers:
    """Number of layers before and after each value of the forward pass.

    A layer is a dot or convolution of an activation with a parameter, or an embedding.
    """

    def __init__(self, graph: Graph, flows: Flows) -> None:
        self.flows = flows
        count = len(graph.avals)
        self._before, self._after = [0] * count, [0] * count
        forward = [node for node in graph.nodes if not is_backward(node.scope)]
        for _ in range(2 if graph.carries else 1):
            for node in forward:
                self._count_before(node)
            for node in reversed(forward):
                self._count_after(node)

    def end(self, node: Node) -> str:
        """Return `"first"` or `"last"` for a layer at an end of a chain of three or more."""
        before, after = self._before[self._activation(node)], self._after[node.outs[0]]
        if before + 1 + after < _MIDDLE or (before and after):
            return ""
        return "last" if before else "first"

    def _count_before(self, node: Node) -> None:
        if self._is_layer(node):
            depth = self._before[self._activation(node)] + 1
        else:
            depth = max((self._before[v] for v in node.ins), default=0)
            depth = max(depth, 1) if node.name == "gather" else depth
        for out in node.outs:
            is_activation = self.flows[out] is Flow.ACTIVATION
            self._before[out] = min(depth, _MIDDLE) if is_activation else 0

    def _count_after(self, node: Node) -> None:
        depth = max((self._after[v] for v in node.outs), default=0)
        readers = node.ins
        if self._is_layer(node):
            depth, readers = depth + 1, (self._activation(node),)
        for value in readers:
            self._after[value] = min(max(self._after[value], depth), _MIDDLE)

    def _is_layer(self, node: Node) -> bool:
        return node.role is Role.CONTRACT and Flow.PARAMETER in self.flows.of(node)

    def _activation(self, node: Node) -> int:
        flows = self.flows.of(node)
        return node.ins[flows.index(Flow.PARAMETER) ^ 1 if Flow.PARAMETER in flows else 0]
