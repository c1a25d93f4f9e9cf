"""Compute matrices that a program makes of numbers written in it: bands, blocks, tables of waves.

A captured matrix, as parameters may be, is read as it is, and nothing that is made of it computed.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import Trait
from jaxamp.jaxprs.nested import nested
from jaxamp.plan.graph.graph import Graph, Link, Node, Role

_LARGEST = 1 << 20  # elements: what is larger counts as unknown
_ROLES = (Role.CONTRACT, Role.REDUCE, Role.ELEMENTWISE, Role.MOVE, Role.MERGE, Role.CONVERT)
_OF_DEVICES = (Trait.ALLREDUCE, Trait.COLLECTIVE, Trait.VARY)


class KnownArrays:
    """Captured arrays, and values made of literals and vectors; each is computed if asked for."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._arrays = dict(graph.captured)
        self._makers: dict[int, Node] = {}
        parts = {v for v in graph.constants.keys() | graph.captured.keys() if self._is_part(v)}
        for node in graph.nodes:
            if parts.issuperset(node.ins) and _is_pure(node) and self._is_small(node.outs):
                self._makers.update(dict.fromkeys(node.outs, node))
                parts.update(node.outs)

    def __contains__(self, value: int) -> bool:
        return value in self._arrays or self.is_made(value)

    def is_made(self, value: int) -> bool:
        """Return whether the program makes a value of numbers that are written in it."""
        return value in self._makers

    def __getitem__(self, value: int) -> np.ndarray:
        pending = [value]
        for made in pending:
            if made not in self._arrays and made in self._makers:
                pending += self._makers[made].ins
        needed = {self._makers[v] for v in pending if v in self._makers and v not in self._arrays}
        for node in sorted(needed, key=lambda node: node.index):
            operands = [self[v] for v in node.ins]
            results = operands if node.link else jax_compat.computed(node.eqn, operands)
            self._arrays.update(zip(node.outs, results, strict=True))
        if value not in self._arrays:
            return np.asarray(self._graph.constants[value], self._graph.avals[value].dtype)
        return np.asarray(self._arrays[value])

    def _is_part(self, value: int) -> bool:
        """Return whether a value is a literal, or a captured array that is no float matrix."""
        graph, shape = self._graph, self._graph.avals[value].shape
        if value in graph.captured:
            return sum(n != 1 for n in shape) < 2 or graph.kinds[value] != "f"
        return not shape and value not in graph.sources

    def _is_small(self, values: Collection[int]) -> bool:
        sizes = (self._graph.sizes[v] for v in values)
        return all(isinstance(size, int) and size <= _LARGEST for size in sizes)


def _is_pure(node: Node) -> bool:
    """Return whether a node computes the same whenever it is asked, and on any device."""
    if node.eqn is None:
        return node.link is Link.INVARIANT
    is_plain = node.role in _ROLES and node.trait not in _OF_DEVICES
    is_iota = node.trait is Trait.GENERATOR and not node.ins
    is_solved = node.trait is Trait.LINALG and not nested(node.eqn)
    return (is_plain or is_iota or is_solved) and not node.eqn.effects
