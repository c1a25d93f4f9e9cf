"""Classify values as parameters, activations or gradients, and dots by their place in a network."""

from __future__ import annotations

import enum

from jaxamp.jaxprs.name_stack import is_backward
from jaxamp.plan.graph.graph import Graph, Node, Role


class Flow(enum.IntEnum):
    """Origin of a value: the caller, a layer or the backward pass."""

    PARAMETER = 0  # an argument, moved or computed with elementwise
    ACTIVATION = 1  # computed by a layer, or gathered from an embedding
    GRADIENT = 2  # computed by the backward pass


class Flows:
    """The flow of every value, found in one sweep, two where there are loops."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._flows: list[Flow] = [Flow.PARAMETER] * len(graph.avals)
        for value in graph.activations:
            self._flows[value] = Flow.ACTIVATION
        for _ in range(2 if graph.carries else 1):
            for node in graph.nodes:
                self._follow(node)

    def __getitem__(self, value: int) -> Flow:
        return self._flows[value]

    def of(self, node: Node) -> tuple[Flow, Flow]:
        """Return the flows of a dot's operands; of two boundary values, one counts as activation.

        The operand of smaller rank is the parameter; at equal rank it is the right one, as in `x @
        w`.
        """
        lhs, rhs = node.ins[:2]
        flows = self._flows[lhs], self._flows[rhs]
        if flows != (Flow.PARAMETER, Flow.PARAMETER):
            return flows
        if self.graph.avals[lhs].ndim < self.graph.avals[rhs].ndim:
            return Flow.PARAMETER, Flow.ACTIVATION
        return Flow.ACTIVATION, Flow.PARAMETER

    def _follow(self, node: Node) -> None:
        flows = self._flows
        if node.role is Role.MOVE and not self._is_embedding(node):
            for source, out in node.moves:
                seed = is_backward(node.scope) and source in self.graph.constants
                flows[out] = Flow.GRADIENT if seed else flows[source]
            return
        flow = self._flow_of(node)
        for out in node.outs:
            flows[out] = flow

    def _flow_of(self, node: Node) -> Flow:
        arriving = max((self._flows[v] for v in node.ins), default=Flow.PARAMETER)
        if node.role is Role.LINK:
            return arriving
        if is_backward(node.scope):
            recomputes = node.role is Role.CONTRACT and arriving is not Flow.GRADIENT
            return Flow.ACTIVATION if recomputes else Flow.GRADIENT
        if node.role is Role.CONTRACT or self._is_embedding(node):
            return Flow.ACTIVATION
        # Outside of a backward pass a gradient updates something: a parameter.
        return Flow.PARAMETER if arriving is Flow.GRADIENT else arriving

    def _is_embedding(self, node: Node) -> bool:
        """Return whether a node gathers rows by computed indices, as an embedding does."""
        indices = node.ins[1:]
        return node.name == "gather" and any(i not in self.graph.constants for i in indices)


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
