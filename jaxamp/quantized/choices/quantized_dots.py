"""Decide which contractions are quantized, and how, by their places in a network."""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from jaxamp.core import jax_compat
from jaxamp.core.formats import CastConfig, Precision, is_narrow
from jaxamp.core.taxonomy import OpKind
from jaxamp.jaxprs.name_stack import is_backward, is_repeated
from jaxamp.plan.findings import Draft
from jaxamp.plan.graph.graph import Graph, Link, Node, Role
from jaxamp.plan.precision.choose import Choice
from jaxamp.plan.precision.overrides import Forced
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.quantized.choices.scaled import Scaled
from jaxamp.quantized.scaling import VALUES, Scaling


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


class Axes(NamedTuple):
    """Sizes of a dot's axes: batch, free ones of each operand, and contracted ones."""

    batch: int
    free: tuple[int, int]
    summed: int


def find_scaled(draft: Draft) -> dict[Node, Choice]:
    """Return new choices for the dots that a scaled policy, or a rule, quantizes."""
    graph, policy, forced, choices = draft.flow.graph, draft.policy, draft.forced, draft.choices
    asked = {n: p for n, (p, _) in forced.by_node.items() if p in VALUES}
    if not asked and not policy.is_scaled:
        return {}
    scaler = _Scaler(graph, policy)
    return {
        node: scaler.choose(node, choices[node], asked.get(node))
        for node in graph.nodes
        if node.role is Role.CONTRACT and _may_quantize(node, choices[node], forced, policy)
    }


def _may_quantize(node: Node, choice: Choice, forced: Forced, policy: PrecisionPolicy) -> bool:
    """Return whether a dot is narrow, and no rule asks for 16 bits."""
    if len(node.outs) > 1:  # an attention
        return False
    precision, _ = forced.of(node)
    is_asked = policy.is_scaled if precision is None else precision in VALUES
    return is_asked and is_narrow(choice.operand)


class _Scaler:
    """Chooser of quantized dots, which treats dots of one operand alike."""

    def __init__(self, graph: Graph, policy: PrecisionPolicy) -> None:
        self.graph, self.policy = graph, policy
        self.scaling: Scaling = policy.scaling
        self.flows = Flows(graph)
        self.layers = Layers(graph, self.flows)
        links = (n for n in graph.nodes if n.link in (Link.INVARIANT, Link.SLICE, Link.STACK))
        self.passed_on = {n.outs[0]: n.ins[0] for n in links}
        self.scaled: set[int] = set()  # origins of operands of scaled forward dots
        self.plain: set[int] = set()  # and of unscaled ones

    def choose(self, node: Node, choice: Choice, asked: Precision | None) -> Choice:
        """Return the choice for a dot, quantized or with the reason why not."""
        obstacle = _obstacle(self.graph, node)
        refusal = obstacle if obstacle or asked else self._refusal(node)
        if not is_backward(node.scope):
            (self.plain if refusal else self.scaled).update(map(self._origin, node.ins[:2]))
        if refusal:
            return choice._replace(reason=f"{choice.reason}; {refusal}")
        scaled = self._scaled(node, self._cast(asked))
        return choice._replace(form=scaled, reason=f"scaled: {scaled}")

    def _cast(self, asked: Precision | None) -> CastConfig:
        compute = self.policy.cast_for(OpKind.COMPUTE)
        if asked is None or asked is compute.out_dtype:
            return compute
        return CastConfig(asked, round_sf=True)

    def _scaled(self, node: Node, compute: CastConfig) -> Scaled:
        casts = self.scaling.casts(compute)
        by_flow = casts.weight, casts.activation, casts.gradient or casts.activation
        left, right = self.flows.of(node)
        return Scaled((by_flow[left], by_flow[right]), casts.gradient)

    def _refusal(self, node: Node) -> str:
        """Return why a dot is not quantized; empty if it is."""
        scaling, flows, axes = self.scaling, self.flows.of(node), axes_of(self.graph, node)
        if axes.batch:
            return "batched dots are not scaled"
        if Flow.GRADIENT in flows:
            return self._refusal_of_backward(node, flows, axes)
        if Flow.PARAMETER not in flows:
            return "not scaled: no operand is a parameter"
        weight = flows.index(Flow.PARAMETER)
        origin = self._origin(node.ins[weight])
        if is_repeated(node.scope) and (origin in self.scaled) != (origin in self.plain):
            return "" if origin in self.scaled else "not scaled, like the dot that it recomputes"
        if not scaling.ends and (end := self.layers.end(node)):
            return f"the {end} layer is not scaled"
        return self._too_small(axes, axes.summed, axes.free[weight])

    def _refusal_of_backward(self, node: Node, flows: tuple[Flow, Flow], axes: Axes) -> str:
        """Return why a backward dot is not quantized; it follows the forward dot it belongs to."""
        if self.scaling.casts(self.policy.cast_for(OpKind.COMPUTE)).gradient is None:
            return "products of the backward pass are not scaled"
        if flows[0] is flows[1]:
            return "not scaled: both operands are gradients"
        known = 1 - flows.index(Flow.GRADIENT)
        origin = self._origin(node.ins[known])
        if (origin in self.scaled) != (origin in self.plain):
            return "" if origin in self.scaled else "not scaled, like the dot that it belongs to"
        features = axes.summed if flows[known] is Flow.PARAMETER else axes.free[1 - known]
        return self._too_small(axes, axes.free[known], features)

    def _too_small(self, axes: Axes, summed: int, features: int) -> str:
        multiple = self.scaling.multiple
        for size in (*axes.free, axes.summed):
            if not isinstance(size, int):
                return f"not scaled: the size {size} is not known"
            if size % multiple:
                return f"not scaled: {size} is not a multiple of {multiple}"
        for limit_summed, limit_features in self.scaling.small:
            if _within(summed, limit_summed) and _within(features, limit_features):
                return f"not scaled: too small ({summed} × {features})"
        return ""

    def _origin(self, value: int) -> int:
        """Return the value that a value was moved from, into or out of a loop as well."""
        while (origin := self.graph.origin(value)) in self.passed_on:
            value = self.passed_on[origin]
        return origin


def _obstacle(graph: Graph, node: Node) -> str:
    """Return why a node can never be quantized; empty if it can."""
    if node.name == "conv_general_dilated":
        return "convolutions are not scaled"
    if node.name != "dot_general":
        return f"{node.name} is not scaled"
    # JAX gives a transposed product an `out_sharding` on meshes of automatic axes, too (0.10.2).
    if any(jax_compat.has_typed_sharding(graph.avals[v]) for v in (*node.ins, *node.outs)):
        return "not scaled: its sharding is part of its type"
    return ""


def axes_of(graph: Graph, node: Node) -> Axes:
    """Return the sizes of a `dot_general`'s axes."""
    summed, batch = node.eqn.params["dimension_numbers"]
    shapes = [graph.avals[v].shape for v in node.ins[:2]]
    total = math.prod(shapes[0][axis] for axis in summed[0])
    free = [
        math.prod(size for axis, size in enumerate(shape) if axis not in (*s, *b))
        for shape, s, b in zip(shapes, summed, batch, strict=True)
    ]
    return Axes(len(batch[0]), (free[0], free[1]), total)


def _within(size: int, limit: int | None) -> bool:
    return limit is None or size <= limit
