"""Find values that are never stored: the insides of fused regions and of reduction islands.

XLA fuses elementwise operations and reductions, so that a value that only they read costs no memory
traffic in float32. A softmax or norm is then float32 inside and rounded once, at its edge, without
being recognized as such.

A reader that runs after a later Compute operation than the value (the backward pass, the end of a
residual connection) cannot be fused with it. Such a far reader recomputes the value if it is fused
itself (`fused_groups.py`), and reads a narrow copy if not.
"""

from __future__ import annotations

import math

from jaxamp.core.taxonomy import Trait
from jaxamp.jaxprs.contracted import is_vector, multiplies_by_vector
from jaxamp.plan.dataflow.lookups import is_repeated_gather
from jaxamp.plan.graph.graph import Graph, Link, Node, Role
from jaxamp.plan.graph.sweeps import mark

ARITHMETIC = (Role.ELEMENTWISE, Role.MOVE)
_FUSING_ROLES = (*ARITHMETIC, Role.REDUCE, Role.FIXED, Role.CONVERT)
_FUSED_MERGES = ("pad",)  # the cotangent of a slice, added to others in one kernel
_KERNELS = (Role.CONTRACT, Role.FIXED, Role.LINK)
COSTLY = (Trait.SMOOTH, Trait.SENSITIVE)  # too costly to be computed twice
EQUALITIES = ("eq", "ne")
SIGNS = ("gt", "le")  # comparisons with zero that are equal for `x` and `max(x, 0)`
_LOGIC = ("and", "or", "xor", "not")
_NEVER = 1 << 60  # deeper than any value


class FusionRegions:
    """Values and nodes that are fused, and those that are not.

    Attributes:
      depth: per value, the number of Compute operations, kernels and loops on the longest path to
        it.
      ready: per node, the depth at which all its operands are available; nodes that read memory as
        it is are never ready to be fused.
      kernels: per node, 1 if it is a kernel of its own, which fuses nothing.
      fused: per value, 1 if it stays in float32 for the readers of its own depth.
      forwarded: per value, 1 if a node reads it, or what it is moved to, from memory as it is.
      summing: products with a vector in each batch, which are fused with what they add up.
      joined: per value, 1 if it is computed from several stored activations.
      relu_outputs: results of `max(x, 0)`.
      sign_tests: nodes that compare such a result with zero: any format will do.
      bias_sums: sums of a convolution and a bias that are stored; see `stored_joins.py`.
    """

    def __init__(self, graph: Graph) -> None:
        """Sweep forward for depths, and backward for values that near readers take in float32."""
        count = len(graph.avals)
        self.depth = [0] * count
        self.ready: list[int] = []
        self.kernels = bytearray(len(graph.nodes))
        self.fused, self.joined, self.forwarded = (bytearray(count) for _ in range(3))
        self.relu_outputs = {
            out
            for node in graph.named.get("max", ())
            if any(graph.constants.get(v) == 0 for v in node.ins)
            for out in node.outs
        }
        signs = (n for name in SIGNS for n in graph.named.get(name, ()))
        tests = (n for n in signs if n.ins[0] in self.relu_outputs)
        self.sign_tests = {n for n in tests if graph.constants.get(n.ins[1]) == 0}
        self.bias_sums: set[int] = set()
        for value in graph.later:
            self.depth[value] = 1
        self.summing = _find_summing(graph)
        self._find_depths(graph)
        for node in reversed(graph.nodes):
            if self.takes_stored(node):
                mark(self.forwarded, node.ins, 1)
            for source, out in node.moves if node.role is Role.MOVE else ():
                self.forwarded[source] |= self.forwarded[out]
            is_reduction = node.role is Role.REDUCE and not selects_in_windows(graph, node)
            if node.role in ARITHMETIC or is_reduction or node.name in _FUSED_MERGES:
                for value in node.outs:
                    self.fused[value] = graph.is_float32[value] and self._is_fused(graph, value)

    def _find_depths(self, graph: Graph) -> None:
        depth, summing = self.depth, self.summing
        for node in graph.nodes:
            role = node.role
            is_repeated = node.name == "gather" and is_repeated_gather(graph, node)
            is_alone = role in _KERNELS and not (node in summing or combines_masks(graph, node))
            windowed = role is Role.REDUCE and is_window(graph, node)
            is_kernel = is_alone or is_repeated or windowed
            self.kernels[node.index] = is_kernel
            reached = 0
            for value in node.ins:
                if depth[value] > reached:
                    reached = depth[value]
            # A sum takes f32, as its terms may cancel.
            selects = windowed and selects_in_windows(graph, node)
            reads_memory = role is Role.LINK or (is_alone and role is Role.CONTRACT)
            takes_stored = selects or is_repeated or reads_memory
            self.ready.append(_NEVER if takes_stored else reached)
            if node.ins and node.link is not Link.BACK:
                for value in node.outs:
                    depth[value] = reached + is_kernel

    def _is_fused(self, graph: Graph, value: int) -> bool:
        """Return whether every near reader can be fused with the node that computes a value."""
        if value in graph.outputs or value in graph.onward:
            return False
        readers, ready, depth = graph.readers[value], self.ready, self.depth[value]
        near = [r for r in readers if ready[r.index] <= depth and r not in self.sign_tests]
        if not near:  # recomputing it is cheaper than to store and read it
            return bool(readers) and not any(self.kernels[r.index] for r in readers)
        summing = self.summing
        return False not in [
            r.role in _FUSING_ROLES or r.name in _FUSED_MERGES or r in summing for r in near
        ]

    def takes_stored(self, reader: Node) -> bool:
        """Return whether a node reads memory as it is: a loop, branch, gather or prefix maximum."""
        return reader.role is not Role.CONTRACT and self.ready[reader.index] == _NEVER

    def is_far(self, value: int, reader: Node) -> bool:
        """Return whether a reader takes the stored form, or runs after a later kernel."""
        return self.ready[reader.index] > self.depth[value]


def _find_summing(graph: Graph) -> set[Node]:
    """Return products with a vector in each batch: XLA adds up their terms where they are made.

    What another product reads is in memory, and what is costly is not computed again.
    """
    dots = graph.named.get("dot_general", ())
    found = {n for n in dots if multiplies_by_vector(n.eqn, in_batches=True)}
    if not found:
        return found
    cheap = {
        v
        for n in graph.nodes
        if n.role is Role.ELEMENTWISE and n.trait not in COSTLY
        for v in n.outs
    }

    def is_made_here(value: int) -> bool:
        products = (r for r in graph.readers[value] if r.role is Role.CONTRACT)
        return graph.origin(value) in cheap and found.issuperset(products)

    def is_summing(node: Node) -> bool:
        places = [i for i in (0, 1) if not is_vector(node.eqn, i)]
        return len(places) == 1 and is_made_here(node.ins[places[0]])

    return set(filter(is_summing, found))


def find_relu_signs(graph: Graph, regions: FusionRegions) -> set[int]:
    """Return results of ReLUs that Compute reads and whose sign alone is read besides.

    The rule of `relu` returns `max(x, 0)`, and compares it with zero for the tangents. Where the
    result leaves narrow, the rule rounds it itself, behind a barrier, and compares that, which has
    the same sign. The backward pass then needs no residual of the ReLU but its stored result.
    """
    return {
        value
        for value in graph.onward & regions.relu_outputs
        if graph.readers[value] and regions.sign_tests.issuperset(graph.readers[value])
    }


def find_relu_tangents(graph: Graph, signed: set[int]) -> set[int]:
    """Return the tangents that such a sign selects and the rule returns.

    They are rounded before they are masked rather than after, which gives the same number.
    Transposed, a cotangent is masked while it is narrow: so the narrow cotangent is stored, rather
    than the mask beside it.
    """
    signs = {out for value in signed for reader in graph.readers[value] for out in reader.outs}
    masks = (node for node in graph.named.get("select_n", ()) if node.ins[0] in signs)
    return {
        out for node in masks for out in node.outs if out in graph.onward if not graph.readers[out]
    }


def is_window(graph: Graph, node: Node) -> bool:
    """Return whether a reduction keeps its axes (pooling, running sums): a kernel of its own."""
    if node.role is not Role.REDUCE:
        return False
    return graph.avals[node.outs[0]].ndim == graph.avals[node.ins[0]].ndim


def selects_in_windows(graph: Graph, node: Node) -> bool:
    """Return whether a kernel selects stored numbers, or adds to the positions of those.

    The largest of rounded numbers is a rounded number: it is stored as they are.
    """
    return is_window(graph, node) and (node.trait is Trait.EXTREMUM or is_pooling_gradient(node))


def combines_masks(graph: Graph, node: Node) -> bool:
    """Return whether a node is boolean arithmetic, which is fused like any other."""
    return node.name in _LOGIC and graph.kinds[node.outs[0]] == "b"


def is_pooling_gradient(node: Node) -> bool:
    """Return whether a reduction scatters the gradient of a max pooling, fused with no reader."""
    return node.name == "select_and_scatter_add"


LONGEST_ROW = 2**14
"""Numbers of a row whose softmax is one kernel, in XLA:GPU; with one more it is five, which move
16 bytes of each float32 number in the place of 8 (compiled for an H200, JAX 0.10.2)."""


def reduces_rows(graph: Graph, node: Node, longest: float = math.inf) -> bool:
    """Return whether only the minor axis is reduced, and is not longer than some."""
    rank, rows = graph.avals[node.ins[0]].ndim, graph.avals[node.ins[0]].shape[-1:]
    is_short = all(not isinstance(n, int) or n <= longest for n in rows)  # symbolic ones may be
    return rank > 1 and is_short and tuple(node.eqn.params.get("axes", ())) == (rank - 1,)
