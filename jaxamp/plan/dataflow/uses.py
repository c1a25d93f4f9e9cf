"""Find what each value is used for: one backward sweep, repeated over loops."""

from __future__ import annotations

from collections.abc import Callable, Set

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.lookups import find_transposed_lookups
from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.consumers import is_exact
from jaxamp.plan.graph.graph import Carry, Graph, Link, Node, Role
from jaxamp.plan.graph.sweeps import backward, column, mark, union

ESCAPES = 1  # becomes a result by elementwise operations and movement alone
STOPS_LOOP = 2  # decides when a loop stops
FEEDS_FACTORIZATION = 4  # a factorization, or the operator that a solver iterates on, needs it
REACHES = 8  # feeds a Compute operation that will be lowered
TESTED = 16  # it, or a value computed from it without Compute, is compared to stop a loop
NEEDED = 32  # a result or an effect depends on it
ITERATED = 64  # as TESTED, but only as a later state of the loop, made without a comparison
PLACE = 128  # says where to look something up: `table[floor(c)]`, `jnp.interp`, warps

_DISCRETE = frozenset("iub")
_COMPARED = TESTED | ITERATED
_DECIDING = STOPS_LOOP | _COMPARED

# A value computed before a loop stops it only if the loop's condition compares it: TESTED then
# makes it STOPS_LOOP, wherever it is computed. ITERATED does in the loop alone: see `_tested`.
_SETTLED = bytes(flags | STOPS_LOOP if flags & _COMPARED else flags for flags in range(256))

# Whether a Compute node would be lowered, given the flags of its results.
Lowerable = Callable[[Node, int], bool]


class Uses:
    """Uses of all values, as flags.

    Attributes:
      bits: the flags of each value: `ESCAPES`, `REACHES` and the others above.
      escapes: per value, 1 if it has the flag `ESCAPES`; the columns that follow are alike.
      stops_loop: `STOPS_LOOP`.
      reaches: `REACHES`.
      needed: `NEEDED`.
      place: `PLACE`. What is made of a coordinate beside the place, to weigh neighbours by, no
        longer belongs to the place of a rounded one. The index of a largest element is none: what
        it is chosen among has an order, and no coordinate.
    """

    def __init__(self, bits: bytearray) -> None:
        self.bits = bits
        self.escapes, self.stops_loop = column(bits, ESCAPES), column(bits, STOPS_LOOP)
        self.reaches, self.needed = column(bits, REACHES), column(bits, NEEDED)
        self.place = column(bits, PLACE)

    def needs(self, node: Node) -> bool:
        """Return whether a node's results or effects are needed: compilers drop the rest."""
        return _is_needed(union(self.bits, node.outs), node)


def find_uses(
    graph: Graph,
    provenance: Provenance,
    may_lower: Lowerable,
    repeated: frozenset[int],
    *,
    no_gain: bool,
) -> Uses:
    """Sweep backward until nothing changes; more than once only where a loop feeds back.

    What is `repeated` decides when a loop stops, as it did the first time. Without `no_gain` all
    values count as read by Compute. A carry of an outermost loop whose result no Compute reads
    keeps its dtype, and from then on counts so: `keeps_dtype` of it is written.
    """
    bits = bytearray(len(graph.avals))
    if not no_gain:
        bits[:] = bytes([REACHES]) * len(bits)
    mark(bits, graph.outputs | graph.onward | graph.predicates | graph.indices, NEEDED)
    mark(bits, graph.outputs, ESCAPES)
    mark(bits, graph.onward, REACHES)
    mark(bits, graph.predicates, STOPS_LOOP | TESTED)
    mark(bits, repeated, STOPS_LOOP)
    _sweep(graph, provenance, bits, may_lower)
    cotangents = find_transposed_lookups(graph, provenance, column(bits, REACHES))
    if cotangents:
        mark(bits, cotangents, REACHES)
        _sweep(graph, provenance, bits, may_lower)
    return Uses(bits.translate(_SETTLED))


def _sweep(graph: Graph, provenance: Provenance, bits: bytearray, may_lower: Lowerable) -> None:
    keeping = {v for c in graph.carries if c.keeps_dtype for v in (c.inner, c.result)}
    # Of what is after a loop all uses are known here, but for those of lookups that are transposed.
    is_ordered = "scatter-add" not in graph.named
    outer = {c.result: c for c in graph.carries if is_ordered and c.is_outer and not c.keeps_dtype}
    states = {carry.out: carry.result for carry in _find_states(graph)}
    for node in backward(graph, bits):
        given = union(bits, node.outs)
        if not _is_needed(given, node):
            continue
        for out in states.keys() & node.outs if states else ():
            _iterate(bits, out, states[out])
            given = union(bits, node.outs)
        if given & PLACE and node.role is not Role.CONTRACT and node.trait is not Trait.EXTREMUM:
            mark(bits, node.ins, PLACE)
        if node.role is Role.LINK:
            if (out := node.outs[0]) in outer and not given & REACHES:
                outer[out].keeps_dtype = True
                keeping |= {out, outer[out].inner}
            _link(graph, bits, node, keeping)
        elif node.role is Role.MOVE:
            _move(graph, bits, node, given)
        else:
            mark(bits, node.ins, _propagated(graph, provenance, node, given, may_lower) | NEEDED)
            if node.role is Role.FIXED:
                mark(bits, _factored(graph, node), FEEDS_FACTORIZATION)


def _is_needed(given: int, node: Node) -> bool:
    return bool(given & NEEDED or (node.eqn is not None and node.eqn.effects))


def is_state_update(provenance: Provenance, uses: Uses, node: Node) -> bool:
    """Return whether a node passes a boundary value on to a result: an optimizer step, an average.

    Such a chain is rounded nowhere, and its result is a parameter again: to its readers a boundary
    value, not an activation.
    """
    return _makes_state(provenance, node) and bool(uses.escapes[node.outs[0]])


def _makes_state(provenance: Provenance, node: Node) -> bool:
    is_computed = node.role is Role.ELEMENTWISE or node.role is Role.MERGE
    return is_computed and bool(provenance.state[node.outs[0]])


def _propagated(
    graph: Graph, provenance: Provenance, node: Node, given: int, may_lower: Lowerable
) -> int:
    """Return the flags that a node propagates from its results to its operands."""
    role = node.role
    # Selecting an index (the next token, say) is no convergence test.
    passed = given & _DECIDING if given & _DECIDING and not _selects_index(graph, node) else 0
    if passed & ITERATED and _jumps(graph, node):
        passed |= TESTED
    if role is Role.CONTRACT:
        if passed & _COMPARED and may_lower(node, given & ~_DECIDING):
            passed &= ~_COMPARED  # an inner product is a reduction
        return passed | REACHES if may_lower(node, _SETTLED[given]) else passed
    if role is Role.FIXED:
        return passed | ESCAPES if node.trait is Trait.STATE else passed
    passed |= given & (
        FEEDS_FACTORIZATION if role is Role.REDUCE else FEEDS_FACTORIZATION | ESCAPES
    )
    if (
        given & REACHES
        and not _is_discrete(graph, node)
        and not (given & ESCAPES and _makes_state(provenance, node))
    ):
        passed |= REACHES
    return passed


def _factored(graph: Graph, node: Node) -> tuple[int, ...]:
    """Return the operands that a node factors or, as a solver does, multiplies in each iteration.

    A right-hand side is none of them: the error of the solution is that of the right-hand side.
    """
    if node.trait is Trait.SOLVER:
        return node.ins[: sum(node.eqn.params["const_lengths"])]
    return () if graph.factors.isdisjoint(node.outs) else node.ins


def _move(graph: Graph, bits: bytearray, node: Node, given: int) -> None:
    indices = [v for v in node.ins[1:] if graph.kinds[v] in "iu" and v not in graph.constants]
    mark(bits, indices, PLACE)
    if given & _DECIDING and not _selects_index(graph, node):
        mark(bits, node.ins, given & _DECIDING)
    mark(bits, node.ins, NEEDED)
    for source, out in node.moves:
        bits[source] |= bits[out] & (ESCAPES | REACHES | FEEDS_FACTORIZATION)


def _is_discrete(graph: Graph, node: Node) -> bool:
    """Return whether a node computes only masks, indices and counts: these are never rounded."""
    return _DISCRETE.issuperset(map(graph.kinds.__getitem__, node.outs))


def _jumps(graph: Graph, node: Node) -> bool:
    """Return whether a small error may change a node's result by a whole step, or not at all."""
    if node.name == "is_finite":
        return False
    return _is_discrete(graph, node) or node.trait is Trait.INTEGRAL or node.name == "sign"


def _selects_index(graph: Graph, node: Node) -> bool:
    return node.trait is Trait.EXTREMUM and any(graph.kinds[v] in "iu" for v in node.outs)


def _find_states(graph: Graph) -> list[Carry]:
    """Return the states of while loops that are in no other while loop.

    What a loop keeps beside its state and replaces, such as the value of an objective or whether to
    go on, is none; nor is what it only chooses from, such as the best value so far.
    """
    carries = [c for c in graph.carries if c.inner in graph.solving and graph.is_float32[c.inner]]
    if not carries:
        return []
    # One bit for each carry: whether a value may be that carry, and whether it is computed from it.
    same, made = [0] * len(graph.avals), [0] * len(graph.avals)
    for place, carry in enumerate(carries):
        same[carry.inner] = 1 << place
    for node in graph.nodes:
        if node.link is Link.BACK:
            continue
        chosen, computed = union(same, node.ins), union(made, node.ins)
        if not (is_exact(node) or node.role is Role.LINK):
            chosen, computed = 0, computed | chosen
        for out in node.outs:
            if graph.is_float32[out]:
                same[out] |= chosen
                made[out] |= computed
    return [carry for place, carry in enumerate(carries) if made[carry.out] >> place & 1]


def _iterate(bits: bytearray, out: int, result: int) -> None:
    """Record that what makes the next state of a loop is compared only as that state.

    So is a constant of a fixed point, `x` in `z = f(z, x)`. Its rounding moves the fixed point, but
    all states that are compared have the same. The slope of a line search is compared with what was
    not made from it.
    """
    if bits[out] & TESTED and not bits[result] & TESTED:
        bits[out] = bits[out] & ~TESTED | ITERATED


def _link(graph: Graph, bits: bytearray, node: Node, keeping: Set[int]) -> None:
    (out,) = node.outs
    given, link = bits[out], node.link
    mark(bits, node.ins, _tested(graph, given, node) | NEEDED)
    if out in graph.iterated:  # no test but that of a loop around it
        mark(bits, node.ins, given & STOPS_LOOP)
    if out in keeping:
        if link is not Link.INIT:
            # A carry that keeps its dtype is stored in it, like a result.
            passed = STOPS_LOOP | REACHES if out in graph.gated else STOPS_LOOP
            mark(bits, node.ins, ESCAPES | given & passed)
        return
    passed = given & (REACHES | FEEDS_FACTORIZATION)
    if link is not Link.INVARIANT:
        passed |= given & ESCAPES
    if link in (Link.BACK, Link.JOIN, Link.STACK, Link.RESULT):
        passed |= given & STOPS_LOOP
    mark(bits, node.ins, passed)


def _tested(graph: Graph, given: int, node: Node) -> int:
    """Return how what enters a loop, goes round or leaves it is compared to stop a loop."""
    if node.outs[0] not in graph.solving or node.link is Link.BACK:
        return given & _COMPARED
    if node.link is Link.INVARIANT:
        return given & TESTED
    return TESTED if given & _COMPARED else 0


_WHOLE = (Link.STACK, Link.JOIN)  # a result is written by every iteration, or by either branch


def find_returned(graph: Graph) -> frozenset[int]:
    """Return the program's results, and what only moves, or leaves a loop or branch, to be one.

    They are in memory in float32 whatever else reads them. Narrow results, and those that Compute
    outside reads, are not among them; nor is an array of which a part is returned.
    """
    returned = set(graph.outputs)
    for node in reversed(graph.nodes):
        if node.role is Role.MOVE:
            moved = [(v, out) for v, out in node.moves if out in returned]
            returned.update(v for v, out in moved if graph.sizes[v] == graph.sizes[out])
        elif node.link in _WHOLE and node.outs[0] in returned:
            returned.update(node.ins)
    return frozenset(v for v in returned if graph.is_float32[v])
