"""Rematerialize constants inside loops, rather than read them.

A mask is computed from integers and comparisons, and its fill value is one number. JAX hoists both
out of a loop that it differentiates, where they become arrays that each iteration reads. Inside the
loop, the kernel that uses them recomputes them at next to no cost.

See: https://github.com/jax-ml/jax/pull/1664
"""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
from jax.extend.core import Var

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.decision import RematerializedEquation, RematerializedInput
from jaxamp.plan.graph.graph import Frame, Graph, Link, Nest, Node, Role, sites_of

_MOST = 16  # equations of one constant, made again in each iteration: a bound that no model meets
_MAKERS = (Role.ELEMENTWISE, Role.MOVE, Role.CONVERT)


def find_constants(graph: Graph, frame: Frame) -> dict[Frame, tuple[RematerializedInput, ...]]:
    """Return, per loop body or checkpoint in a loop, the inputs that it recomputes."""
    if all(node.link is not Link.INVARIANT for node in graph.named.get("", ())):
        return {}
    remakes = _Rematerialization(graph)
    bodies = (b for s in sites_of(frame) if _is_kernel(s) for b in s.frames)
    return {body: made for body in bodies if (made := remakes.of(body))}


def _is_kernel(site: Node | Nest) -> TypeGuard[Nest]:
    """Return whether a body's inputs are in memory, rather than fused with their maker."""
    if isinstance(site, Node):
        return False
    return site.op.trait is Trait.LOOP or site.eqn.primitive.name == "remat2"


class _Rematerialization:
    """Finder of values that are computed from literals alone and enter a loop."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._recipes: dict[int, tuple[Node, ...]] = {}
        self._outside: dict[int, int] = {}  # per value inside a loop, that outside
        for node in graph.nodes:
            self._follow(node)

    def of(self, frame: Frame) -> tuple[RematerializedInput, ...]:
        """Return the inputs that a loop body, or a checkpoint in a loop, recomputes."""
        pairs = zip(frame.jaxpr.invars, frame.entries, strict=True)
        return tuple(
            self._rematerialize(var, value)
            for var, value in pairs
            if value in self._outside and self._is_worth_it(var, value)
        )

    def _follow(self, node: Node) -> None:
        if node.link is Link.INVARIANT:
            (source,), (out,) = node.ins, node.outs
            if source in self._recipes:
                self._recipes[out] = self._recipes[source]
                self._outside[out] = self._outside.get(source, source)
        elif (recipe := self._recipe(node)) is not None:
            self._recipes.update(dict.fromkeys(node.outs, recipe))

    def _recipe(self, node: Node) -> tuple[Node, ...] | None:
        """Return the equations that compute a node from literals, in order, or `None`."""
        is_iota = node.trait is Trait.GENERATOR and not node.ins and not node.eqn.effects
        if not is_iota and (node.role not in _MAKERS or not node.ins):
            return None
        parts: dict[Node, None] = {}
        for var, value in zip(node.eqn.invars, node.ins, strict=True):
            if not self._is_literal(value):
                if value not in self._recipes or not self._is_whole(var, value):
                    return None
                parts.update(dict.fromkeys(self._recipes[value]))
        return (*parts, node) if len(parts) < _MOST else None

    def _is_whole(self, atom: Any, value: int) -> bool:
        """Return whether what is read has the size that is made: a `shard_map` parts arrays."""
        return atom.aval.shape == self.graph.avals[value].shape

    def _is_literal(self, value: int) -> bool:
        graph = self.graph
        is_number = value in graph.constants and not graph.avals[value].ndim
        return is_number and value not in graph.sources and value not in self._recipes

    def _is_worth_it(self, var: Var, value: int) -> bool:
        """Return whether the constant is an array whose readers fuse with its computation."""
        is_array = self.graph.sizes[value] != 1 and self._is_whole(var, value)
        return is_array and all(r.role is Role.ELEMENTWISE for r in self.graph.readers[value])

    def _rematerialize(self, var: Var, value: int) -> RematerializedInput:
        equations = tuple(
            RematerializedEquation(node.eqn, tuple(map(self._operand, node.ins)), node.outs)
            for node in self._recipes[value]
        )
        return RematerializedInput(var, equations, self._outside[value])

    def _operand(self, value: int) -> int | np.ndarray:
        """Return the number of a value outside the loop, or the array of a literal."""
        if not self._is_literal(value):
            return self._outside.get(value, value)
        return np.asarray(self.graph.constants[value], self.graph.avals[value].dtype)
