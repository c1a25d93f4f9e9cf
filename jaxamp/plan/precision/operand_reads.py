"""Decide how each reader gets its operands: by its own cast, a shared cast or a narrow copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxamp.core.formats import Precision, is_narrow
from jaxamp.jaxprs.name_stack import is_backward
from jaxamp.plan.dataflow.dataflow import Dataflow
from jaxamp.plan.dataflow.regions import FusionRegions
from jaxamp.plan.dataflow.uses import is_state_update
from jaxamp.plan.graph.graph import Graph, Link, Node, Role
from jaxamp.plan.graph.sweeps import column
from jaxamp.plan.precision.choose import Choice
from jaxamp.policy.policy import PrecisionPolicy


class OperandReads:
    """Precisions and forms in which values are read.

    Attributes:
      own_cast: boundary values, what is made of them alone, without Compute, with as many numbers,
        updates of state, and values only moved from these: each reader makes its own cast, so that
        cotangents are summed in float32; XLA merges the casts themselves. Contractions may share
        one all the same, see `shares_casts`. Float32 invariants of a loop are among them: their
        cotangents are summed over iterations.
      made: what is made of boundary values alone, rows that are looked up and statistics among it.
      copies: precision of the copy that far readers of a fused value get.
      shares_casts: whether contractions share their casts of boundary values, as devices add up
        narrow cotangents: the partitioner gathers a parameter for each of its casts, and reduces a
        gradient for each (XLA:GPU, JAX 0.10.2: `python -m benchmarks.collectives --target h200
        --unrolled`). As by hand, the cotangents of a parameter's readers are then added up in the
        narrow format before devices do.
      states: float32 carries that activations multiply. A backward pass reads them as they are: a
        contraction rounds them where it multiplies, or a loop would stack the rounding as well.
      many_readers: narrow values whose cotangents are summed in float32, and the readers of each.
    """

    def __init__(
        self,
        flow: Dataflow,
        copies: Mapping[int, Precision],
        stored: Sequence[Precision | None],
        policy: PrecisionPolicy,
    ) -> None:
        """Find how values are read.

        `copies` are precisions of the copies that far readers of fused values get. The all-reduce
        of the policy may be narrow.
        """
        self._graph, _, _, self._regions = flow
        self.shares_casts = is_narrow(policy.allreduce)
        self.copies = copies
        made = _find_made(flow, stored)
        self.own_cast, self.made = column(made, _OWN), column(made, _MADE)
        self.states = _find_states(flow)
        self.many_readers = find_many_readers(self._graph, self._regions, copies, stored)

    def originals(
        self, node: Node, choice: Choice, stored: Sequence[Precision | None]
    ) -> tuple[int, ...]:
        """Return the operands of a contraction, by index, that it reads both cast and as stored.

        A contraction computes with rounded boundary values, and is differentiated with respect to
        the wide ones.
        """
        if self.shares_casts or choice.form or not is_narrow(choice.operand):
            return ()
        if not all(self._graph.is_float32[v] for v in node.ins[:2]):  # integers, say
            return ()
        pairs = enumerate(node.ins)
        return tuple(i for i, v in pairs if self.own_cast[v] and stored[v] is Precision.F32)

    def copy_for(self, value: int, reader: Node) -> Precision | None:
        """Return the precision of the copy that a reader gets, `None` for the value itself."""
        copy = self.copies.get(value)
        return copy if copy and self._regions.is_far(value, reader) else None


def _find_states(flow: Dataflow) -> frozenset[int]:
    """Return float32 carries that activations multiply, element by element."""
    graph, provenance, _, _ = flow
    kept = (carry.inner for carry in graph.carries if carry.keeps_dtype)
    products = ((v, r) for v in kept for r in graph.readers[v] if r.name == "mul")
    return frozenset(v for v, r in products if any(provenance.dense[x] and x != v for x in r.ins))


_COMPUTED = (Role.ELEMENTWISE, Role.REDUCE, Role.MERGE)
_OWN, _MADE = 1, 2  # flags of `own_cast` and of `made`
_BOUNDARY = _OWN | _MADE


def _find_made(flow: Dataflow, stored: Sequence[Precision | None]) -> bytearray:
    graph, provenance, uses, _ = flow
    bits, known = bytearray(len(graph.avals)), graph.constants
    for value in graph.sources:
        bits[value] = 0 if is_narrow(stored[value]) else _BOUNDARY
    for carry in graph.carries:
        bits[carry.inner] = bits[carry.result] = _BOUNDARY * carry.keeps_dtype
    for node in graph.nodes:
        if node.role is Role.MOVE:
            for source, out in node.moves:
                bits[out] = bits[source]
        elif node.link is Link.SLICE:
            bits[node.outs[0]] = bits[node.ins[0]]
        elif node.link is Link.INVARIANT:
            bits[node.outs[0]] = 0 if is_narrow(stored[node.outs[0]]) else _BOUNDARY
        elif node.role in _COMPUTED:
            read = [bits[v] & _MADE for v in node.ins if graph.is_float32[v] and v not in known]
            is_update = is_state_update(provenance, uses, node)
            is_made = is_update or (bool(read) and all(read))
            for out in node.outs:
                is_own = is_update or (is_made and bool(provenance.state[out]))
                bits[out] = is_made * _MADE | is_own * _OWN
    return bits


# JAX rounds a sum of n cotangents n - 1 times: of four, no more often than a hand that is right.
_MANY = 5


def find_many_readers(
    graph: Graph,
    regions: FusionRegions,
    copies: Mapping[int, Precision],
    stored: Sequence[Precision | None],
) -> dict[int, frozenset[Node]]:
    """Return the readers of the narrow form of each value that has many of them.

    A loop adds up the cotangents of what it does not change in float32, and a written-out loop is
    no worse: one kernel in twenty products of an iteration, the tokens that every layer of a
    decoder attends to. Readers of a backward pass do not count: nothing differentiates them.
    """
    found = {}
    for value, readers in enumerate(graph.readers):
        if len(readers) >= _MANY and is_narrow(copies.get(value, stored[value])):
            narrow = [r for r in readers if r.role in _READ_NARROW and not is_backward(r.scope)]
            if value in copies:
                narrow = [r for r in narrow if regions.is_far(value, r)]
            if len(narrow) >= _MANY:
                found[value] = frozenset(narrow)
    return found


_READ_NARROW = (Role.CONTRACT, Role.MOVE)
