"""Matrices that a program makes of numbers written in it: bands, blocks, tables of waves.

A captured matrix, as parameters may be, is read as it is, and nothing that is made of it computed.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from jaxamp.jaxprs.known_arrays import KnownArrays
from jaxamp.plan.graph.graph import Graph, Link

_LARGEST = 1 << 20  # elements: what is larger counts as unknown


class KnownValues(KnownArrays):
    """Captured arrays, and values made of literals and vectors.

    Attributes:
      made: values that the program makes of numbers that are written in it.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph.avals, _LARGEST)
        self.made: set[int] = set()
        for value, number in graph.constants.items():
            shape, dtype = graph.avals[value].shape, graph.avals[value].dtype
            if not shape and value not in graph.sources:
                self.enter(value, shape, lambda _, own=(number, dtype): np.asarray(*own))
        matrices = {v for v in graph.captured if _is_matrix(graph, v)}
        self._capture(graph, graph.captured.keys() - matrices)
        known = {*self._makers}
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
            self.made.update(made)
            known.update(made)
        self._capture(graph, matrices)

    def _capture(self, graph: Graph, values: Collection[int]) -> None:
        for value in values:
            array = graph.captured[value]
            self.enter(value, graph.avals[value].shape, lambda _, array=array: array)


def _is_matrix(graph: Graph, value: int) -> bool:
    """Return whether a value is of real numbers along several axes."""
    return graph.kinds[value] == "f" and sum(n != 1 for n in graph.avals[value].shape) > 1
