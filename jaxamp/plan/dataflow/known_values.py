"""Matrices that a program makes of numbers written in it: bands, blocks, tables of waves.

A captured matrix, as parameters may be, is read as it is, and nothing that is made of it computed.
"""

from __future__ import annotations

import functools

import numpy as np

from jaxamp.jaxprs.known_arrays import KnownArrays
from jaxamp.plan.graph.graph import Graph, Link

_LARGEST = 1 << 20  # elements: what is larger counts as unknown


class KnownValues(KnownArrays):
    """Captured arrays, and values made of literals and vectors.

    The latter are found once something is asked for that may be one: in most programs nothing is.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph.avals, _LARGEST)
        self._graph = graph
        for value, array in graph.captured.items():
            self.enter(value, graph.avals[value].shape, lambda _, array=array: array)
        self._possible = {*graph.captured, *self._written()}
        for node in graph.nodes:
            if self._possible.issuperset(node.ins):
                self._possible.update(node.outs)

    def has(self, value: int) -> bool:
        """Return whether an array is captured or made."""
        return value in self._graph.captured or self.is_made(value)

    def is_made(self, value: int) -> bool:
        """Return whether the program makes a value of numbers that are written in it."""
        return value in self._possible and value in self._made

    def _written(self) -> list[int]:
        graph = self._graph
        scalars = (v for v in graph.constants if not graph.avals[v].shape)
        return [v for v in scalars if v not in graph.sources]

    @functools.cached_property
    def _made(self) -> set[int]:
        graph, found = self._graph, set[int]()
        for value in self._written():
            own = graph.constants[value], graph.avals[value].dtype
            self.enter(value, (), lambda _, own=own: np.asarray(*own))
        known = {v for v in self._makers if not (v in graph.captured and _is_matrix(graph, v))}
        for node in graph.nodes:
            if not known.issuperset(node.ins):
                continue
            if node.link is Link.INVARIANT:
                (source,) = node.ins
                shape = self.thin_shape(source)
                self.enter(node.outs[0], shape, lambda known, v=source: known.thin(v))
            elif node.eqn is not None:
                self.follow(node.eqn, node.ins, node.outs)
            made = [value for value in node.outs if value in self]
            found.update(made)
            known.update(made)
        return found


def _is_matrix(graph: Graph, value: int) -> bool:
    """Return whether a value is of real numbers along several axes."""
    return graph.kinds[value] == "f" and sum(n != 1 for n in graph.avals[value].shape) > 1
