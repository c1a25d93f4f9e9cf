"""Constants that a loop makes itself rather than reads.

A mask is made of whole numbers and comparisons, and what fills it of one number. JAX moves both out
of a loop that it differentiates, where they become arrays that each turn reads. Inside the loop,
the kernel that uses them makes them again at next to no cost.
"""

from __future__ import annotations

from typing import TypeGuard

import numpy as np
from jax.extend.core import Var

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.decision import Making, Remake
from jaxamp.plan.graph.graph import Frame, Graph, Link, Nest, Node, Role, sites_of

_MOST = 16  # equations; what takes more is no longer made at next to no cost
_MAKERS = (Role.ELEMENTWISE, Role.MOVE, Role.CONVERT)


def find_constants(graph: Graph, frame: Frame) -> dict[Frame, tuple[Remake, ...]]:
    """What the jaxpr of a loop, or of a checkpoint in one, makes itself; per jaxpr, if anything."""
    if Link.INVARIANT not in graph.links:
        return {}
    remakes = _Rematerialization(graph)
    bodies = (b for s in sites_of(frame) if _is_kernel(s) for b in s.frames)
    return {body: made for body in bodies if (made := remakes.of(body))}


def _is_kernel(site: Node | Nest) -> TypeGuard[Nest]:
    """Whether what bodies read is in memory, rather than fused with what makes it."""
    if isinstance(site, Node):
        return False
    return site.op.trait is Trait.LOOP or site.eqn.primitive.name == "remat2"


class _Rematerialization:
    """Finds what is made of literals alone and goes into a loop."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._recipes: dict[int, tuple[Node, ...]] = {}
        self._outside: dict[int, int] = {}  # per value that enters a loop, what it is outside
        for node in graph.nodes:
            self._follow(node)

    def of(self, frame: Frame) -> tuple[Remake, ...]:
        """What the jaxpr of a loop, or of a checkpoint in one, makes itself."""
        pairs = zip(frame.jaxpr.invars, frame.entries, strict=True)
        return tuple(
            self._rematerialize(var, value)
            for var, value in pairs
            if value in self._outside and self._is_worth_it(value)
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
        """The equations that make a node's results of literals, in order; ``None`` if none do."""
        is_iota = node.trait is Trait.GENERATOR and not node.ins and not node.eqn.effects
        if not is_iota and (node.role not in _MAKERS or not node.ins):
            return None
        parts: dict[Node, None] = {}
        for value in node.ins:
            if not self._is_literal(value):
                if value not in self._recipes:
                    return None
                parts.update(dict.fromkeys(self._recipes[value]))
        return (*parts, node) if len(parts) < _MOST else None

    def _is_literal(self, value: int) -> bool:
        graph = self.graph
        is_number = value in graph.constants and not graph.avals[value].ndim
        return is_number and value not in graph.sources and value not in self._recipes

    def _is_worth_it(self, value: int) -> bool:
        """Whether an array would be read, by what is fused with the making of it."""
        readers = self.graph.readers[value]
        return self.graph.sizes[value] != 1 and all(r.role is Role.ELEMENTWISE for r in readers)

    def _rematerialize(self, var: Var, value: int) -> Remake:
        makings = []
        for node in self._recipes[value]:
            ins = tuple(self._outside.get(v, v) for v in node.ins)
            makings.append(Making(node.eqn, tuple(map(self._number, node.ins)), ins, node.outs))
        return Remake(var, self._outside[value], tuple(makings))

    def _number(self, value: int) -> np.ndarray | None:
        if not self._is_literal(value):
            return None
        return np.asarray(self.graph.constants[value], self.graph.avals[value].dtype)
