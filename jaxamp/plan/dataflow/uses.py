"""What each value is for: one backward sweep, repeated over loops."""

from __future__ import annotations

from collections.abc import Callable

from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.graph.flags import column, union
from jaxamp.plan.graph.graph import Graph, Link, Node, Role, movements
from jaxamp.plan.graph.sweeps import backward

ESCAPES = 1  # becomes a result of the program by elementwise operations and movement alone
EXACTING = 2  # decides when a loop stops
FRAGILE = 4  # feeds a factorisation, with no Compute between
REACHES = 8  # feeds a Compute operation that will be lowered
TESTED = 16  # is compared to decide when a loop stops, or what is made of it without Compute is
NEEDED = 32  # is needed at all

_DECIDING = EXACTING | TESTED

# What is computed before a loop decides only if the loop's test compares it: wherever it is
# computed, TESTED then makes it EXACTING.
_SETTLED = bytes(flags | EXACTING if flags & TESTED else flags for flags in range(256))

# Whether a Compute node would be lowered, given the flags of its results.
Lowerable = Callable[[Node, int], bool]


class Uses:
    """Uses per value.

    Attributes:
      bits: the flags of each value: ``ESCAPES``, ``REACHES`` and the others above.
      escapes: whether each value has the flag ``ESCAPES``; the columns that follow are alike.
      exacting: ``EXACTING``.
      reaches: ``REACHES``.
      needed: ``NEEDED``.
    """

    def __init__(self, bits: bytearray) -> None:
        self.bits = bits
        self.escapes, self.exacting = column(bits, ESCAPES), column(bits, EXACTING)
        self.reaches, self.needed = column(bits, REACHES), column(bits, NEEDED)

    def needs(self, node: Node) -> bool:
        """Whether anything needs what a node makes or does: compilers drop the rest."""
        return _is_needed(self.bits, node)


def find_uses(graph: Graph, provenance: Provenance, may_lower: Lowerable, *, no_gain: bool) -> Uses:
    """Sweeps backward until nothing changes; more than once only where a loop feeds back.

    Args:
      graph: the program.
      provenance: what is known of its values.
      may_lower: whether a Compute node would be lowered, given the flags of its results.
      no_gain: whether what never reaches Compute is to be told apart; else all of it reaches.
    """
    bits = bytearray(len(graph.avals))
    if not no_gain:
        bits[:] = bytes([REACHES]) * len(bits)
    for value in graph.outputs | graph.onward | graph.predicates | graph.indices:
        bits[value] |= NEEDED
    for value in graph.outputs:
        bits[value] |= ESCAPES
    for value in graph.onward:
        bits[value] |= REACHES
    for value in graph.predicates:
        bits[value] |= EXACTING | TESTED
    kept = frozenset(v for c in graph.carries if c.keeps_dtype for v in (c.inner, c.result))
    for node in backward(graph, bits):
        if not _is_needed(bits, node):
            continue
        if node.role is Role.LINK:
            _link(bits, node, kept)
        elif node.role is Role.MOVE:
            _move(graph, bits, node)
        else:
            _mark(bits, node.ins, _passed(graph, provenance, bits, node, may_lower) | NEEDED)
    return Uses(bits.translate(_SETTLED))


def _is_needed(bits: bytearray, node: Node) -> bool:
    for value in node.outs:
        if bits[value] & NEEDED:
            return True
    return node.eqn is not None and bool(node.eqn.effects)


def is_state_update(provenance: Provenance, uses: Uses, node: Node) -> bool:
    """Whether a node carries a boundary value on to a result: an optimizer's step, an average.

    Such a chain is rounded nowhere, and what it makes is a parameter again: to its readers a
    boundary value, not an activation.
    """
    return _updates_state(provenance, uses.bits, node)


def _updates_state(provenance: Provenance, bits: bytearray, node: Node) -> bool:
    if node.role is not Role.ELEMENTWISE and node.role is not Role.MERGE:
        return False
    (out,) = node.outs
    return bool(provenance.state[out] and bits[out] & ESCAPES)


def _passed(
    graph: Graph, provenance: Provenance, bits: bytearray, node: Node, may_lower: Lowerable
) -> int:
    """The flags that a node hands from its results to its operands."""
    role, given = node.role, union(bits, node.outs)
    # A choice of index (the next token, say) is not a convergence test.
    passed = given & _DECIDING if given & _DECIDING and not _picks_index(graph, node) else 0
    if role is Role.CONTRACT:
        if passed & TESTED and may_lower(node, given & ~_DECIDING):
            passed &= ~TESTED  # an inner product is a reduction
        return passed | REACHES if may_lower(node, _SETTLED[given]) else passed
    if role is Role.FIXED:
        if node.trait is Trait.LINALG or node.trait is Trait.SOLVER:
            passed |= FRAGILE
        return passed | ESCAPES if node.trait is Trait.STATE else passed
    passed |= given & (FRAGILE if role is Role.REDUCE else FRAGILE | ESCAPES)
    if (
        given & REACHES
        and not _counts(graph, node)
        and not (given & ESCAPES and _updates_state(provenance, bits, node))
    ):
        passed |= REACHES
    return passed


def _move(graph: Graph, bits: bytearray, node: Node) -> None:
    given = union(bits, node.outs)
    if given & _DECIDING and not _picks_index(graph, node):
        _mark(bits, node.ins, given & _DECIDING)
    _mark(bits, node.ins, given & FRAGILE | NEEDED)
    for source, out in movements(node):
        bits[source] |= bits[out] & (ESCAPES | REACHES)


def _counts(graph: Graph, node: Node) -> bool:
    """Whether a node makes only masks, indices and counts: these are never rounded."""
    return all(graph.kinds[v] in "iub" for v in node.outs)


def _picks_index(graph: Graph, node: Node) -> bool:
    return node.trait is Trait.EXTREMUM and any(graph.kinds[v] in "iu" for v in node.outs)


def _link(bits: bytearray, node: Node, kept: frozenset[int]) -> None:
    (out,) = node.outs
    given, link = bits[out], node.link
    _mark(bits, node.ins, given & TESTED | NEEDED)
    if out in kept:
        if link is not Link.INIT:
            # What goes into a kept carry is stored as the original dtype, like a result.
            _mark(bits, node.ins, ESCAPES | given & EXACTING)
        return
    passed = given & (REACHES | FRAGILE)
    if link is not Link.INVARIANT:
        passed |= given & ESCAPES
    if link in (Link.BACK, Link.JOIN, Link.STACK, Link.RESULT):
        passed |= given & EXACTING
    _mark(bits, node.ins, passed)


def _mark(bits: bytearray, values: tuple[int, ...], flags: int) -> None:
    for value in values:
        bits[value] |= flags
