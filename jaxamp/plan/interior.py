"""Which values are never stored: the insides of fused chains and of reduction islands.

XLA fuses elementwise operations and reductions, so a value that only they read costs no memory
traffic in f32. A softmax or a norm is then f32 inside and rounded once, at its edge, without
anybody having recognised a softmax.

A reader that comes after a later Compute operation than the value (the backward pass, the end of a
residual connection) cannot be fused with it. Such a far reader computes the value again if it is
fused itself (`fusions.py`), and gets a narrow copy if it is not.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxamp.comparisons import SIGNS
from jaxamp.plan.facts import Facts
from jaxamp.plan.graph import Graph, Link, Node, Role, movements
from jaxamp.taxonomy import Trait

_ARITHMETIC = (Role.ELEMENTWISE, Role.MOVE)
_FREE_READERS = (*_ARITHMETIC, Role.REDUCE, Role.FIXED, Role.CONVERT)
_KERNELS = (Role.CONTRACT, Role.FIXED, Role.LINK)
_NONE, _SEVERAL = -1, -2
_NEVER = 1 << 60  # a depth that nothing has


@dataclass(slots=True, eq=False)
class Interior:
    """What is fused.

    Attributes:
      depth: Compute operations, kernels and loops on the longest way to each value.
      ready: per node, the depth at which all that it reads is there; what takes values as they are
        stored is never ready to be fused.
      kernels: whether each node is a kernel of its own, which fuses nothing.
      fused: whether a value stays in f32 for the readers of its own depth.
      joined: whether a value is made of several stored activations.
      rectified: what is cut off at zero.
    """

    depth: list[int]
    ready: list[int]
    kernels: bytearray
    fused: bytearray
    joined: bytearray
    rectified: set[int]

    def reads_sign(self, graph: Graph, reader: Node) -> bool:
        """Whether a node compares what is cut off at zero with zero: any format will do."""
        if reader.name not in SIGNS or reader.ins[0] not in self.rectified:
            return False
        return graph.constants.get(reader.ins[1]) == 0

    def is_far(self, value: int, reader: Node) -> bool:
        """Whether a reader takes what is stored, or comes after a later kernel than the value."""
        return self.ready[reader.index] > self.depth[value]


def find_interior(graph: Graph, facts: Facts) -> Interior:
    """Looks backward for what readers take in f32, then forward for what is cheaper to store."""
    depth = [int(value in graph.later) for value in range(len(graph.avals))]
    fused, joined = bytearray(len(graph.avals)), bytearray(len(graph.avals))
    interior = Interior(depth, [], bytearray(len(graph.nodes)), fused, joined, set())
    _find_depths(graph, interior)
    for node in reversed(graph.nodes):
        if node.role in _ARITHMETIC or (node.role is Role.REDUCE and not scatters(node)):
            for value in node.outs:
                interior.fused[value] = graph.ours[value] and _is_fused(graph, interior, value)
    _store_what_joins(graph, facts, interior)
    return interior


def _is_window(graph: Graph, node: Node) -> bool:
    """Whether a reduction keeps its axes (pooling, running sums): a kernel that fuses nothing."""
    return graph.avals[node.outs[0]].ndim == graph.avals[node.ins[0]].ndim


def scatters(node: Node) -> bool:
    """Whether a reduction adds a few values to places in memory, fused with no reader."""
    return node.name == "select_and_scatter_add"


def folds_rows(graph: Graph, node: Node) -> bool:
    """Whether only the minor axis is folded."""
    rank = graph.avals[node.ins[0]].ndim
    return rank > 1 and tuple(node.eqn.params.get("axes", ())) == (rank - 1,)


def _find_depths(graph: Graph, interior: Interior) -> None:
    depth, ready, kernels = interior.depth, interior.ready, interior.kernels
    for node in graph.nodes:
        role = node.role
        is_window = role is Role.REDUCE and _is_window(graph, node)
        kernels[node.index] = is_kernel = is_window or role in _KERNELS
        reached = max([depth[v] for v in node.ins], default=0)
        # A sum of many takes f32: what it adds up may cancel.
        picks = is_window and (node.trait is Trait.EXTREMUM or scatters(node))
        takes_stored = picks or role is Role.LINK or role is Role.CONTRACT
        if node.name == "max" and any(graph.constants.get(v) == 0 for v in node.ins):
            interior.rectified.update(node.outs)
        ready.append(_NEVER if takes_stored else reached)
        if node.ins and node.link is not Link.BACK:
            for value in node.outs:
                depth[value] = reached + is_kernel


def _is_fused(graph: Graph, interior: Interior, value: int) -> bool:
    """Whether every near reader can be fused with what makes the value."""
    if value in graph.outputs or value in graph.onward:
        return False
    readers = graph.uses[value]
    near = [r for r in readers if not (interior.is_far(value, r) or interior.reads_sign(graph, r))]
    if not near:  # cheaper to compute again than to store and read
        return bool(readers) and not any(interior.kernels[r.index] for r in readers)
    return all(r.role in _FREE_READERS for r in near)


def _store_what_joins(graph: Graph, facts: Facts, interior: Interior) -> None:
    """Takes back what has far readers and is made of several stored values.

    It is stored for the far readers anyway, and the near ones read it more cheaply than all that
    it is made of.
    """
    dense, fused = facts.dense, interior.fused
    made_of = [_NONE] * len(graph.avals)  # the one stored value that feeds a fused one
    for node in graph.nodes:
        any_dense = False
        for value in node.outs:
            made_of[value] = value if dense[value] else _NONE
            any_dense |= dense[value]
        if not any_dense or node.role not in _ARITHMETIC:
            continue
        for value, parts in _parts(node):
            if not dense[value]:
                continue
            joined = _join([made_of[v] for v in parts])
            interior.joined[value] = joined == _SEVERAL
            if graph.kinds[value] == "b":  # a mask is made again where it is read
                made_of[value] = joined
            if not fused[value]:
                continue
            if joined == _SEVERAL and _is_read_later(graph, interior, value):
                is_argument = _is_complemented(graph, interior, node, value)
                joined = node.ins[0] if is_argument else value
                fused[joined] = 0
            made_of[value] = joined


def _is_read_later(graph: Graph, interior: Interior, value: int) -> bool:
    """Whether a later kernel reads a value, or one that waits for a fold of the value itself."""
    readers = graph.uses[value]
    if any(interior.is_far(value, r) for r in readers):
        return True
    folded = any(r.role is Role.REDUCE and not folds_rows(graph, r) for r in readers)
    return folded and any(r.role is Role.ELEMENTWISE for r in readers)


def _is_complemented(graph: Graph, interior: Interior, node: Node, value: int) -> bool:
    """Whether a later kernel needs a curve's distance to its bound.

    `1 - y * y` of a rounded `y` is zero where `tanh` saturates; of its rounded argument it is not.
    """
    if node.trait is not Trait.SMOOTH:
        return False
    squares = [out for r in graph.uses[value] if _squares(r) for out in r.outs]
    pending = [r for v in (value, *squares) for r in graph.uses[v] if _complements(graph, r)]
    seen = set(pending)
    for made in pending:  # the distance, and its products
        for out in made.outs:
            for reader in graph.uses[out]:
                if interior.is_far(out, reader):
                    if reader.role is not Role.LINK:
                        return True
                elif reader.name == "mul" and reader not in seen:
                    seen.add(reader)
                    pending.append(reader)
    return any(interior.is_far(v, r) for r in pending for v in r.ins if v == value)


def _squares(node: Node) -> bool:
    return node.name in ("square", "integer_pow") or (node.name == "mul" and len({*node.ins}) == 1)


def _complements(graph: Graph, node: Node) -> bool:
    return node.name == "one_minus_square" or (
        node.name == "sub" and bool(graph.constants.get(node.ins[0]))
    )


def _parts(node: Node) -> list[tuple[int, tuple[int, ...]]]:
    if node.role is Role.MOVE:
        return [(out, (source,)) for source, out in movements(node)]
    return [(out, node.ins) for out in node.outs]


def _join(parts: list[int]) -> int:
    found = set(parts)
    found.discard(_NONE)
    return _NONE if not found else found.pop() if len(found) == 1 else _SEVERAL
