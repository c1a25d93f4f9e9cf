"""Which values have to be wide for their accuracy, whoever places the casts."""

from __future__ import annotations

from collections.abc import Iterator

from jaxamp.core.formats import is_narrow
from jaxamp.plan.graph.graph import Link, Node, Role
from tests.placement.program import Program

SMALL = ("not an activation",)
"""Reasons of the planner for leaving what would save little: parameters, constants, statistics."""

PLACEMENT = (
    *SMALL,
    "products and convolutions are",
    "larger than its operands",
    "stored in",
    "exact in",
    "a bias:",
    "f32 inside, stored in",
    "moves data in the dtype that it has",
    "f32 inside a kernel",
    "compares stored values",
    "compares operands rounded to",
    "sent in",
    "goes into an f32 carry",
    "operands in bf16; result goes into an f32 carry",
    "operands in f16; result goes into an f32 carry",
)
"""Reasons of the planner that say where a value is stored, and nothing about its accuracy."""


def accurate(program: Program, free: tuple[str, ...] = PLACEMENT) -> set[int]:
    """The values that a guard, the program or the caller holds in float32.

    Args:
      program: the program.
      free: how the reasons begin that are no grounds.

    Returns:
      Parameters and whatever else comes in; the results of operations for which the planner has
      another reason; the carries that it keeps; and what is moved from these, if somebody takes it
      wide.
    """
    graph = program.graph
    found = set(graph.sources)
    found.update(v for c in graph.carries if c.keeps_dtype for v in (c.inner, c.result))
    taken = taken_wide(program)
    for node in program.nodes:
        if _has_ground(program, node, free):
            found.update(node.outs)
        found.update(o for v, o in moved(program, node) if v in found and o in taken)
    return {v for v in found if graph.is_float32[v]}


def _has_ground(program: Program, node: Node, free: tuple[str, ...]) -> bool:
    if node.role in (Role.FIXED, Role.CONVERT):
        return not node.name.startswith("empty")  # which holds nothing that could be rounded
    if node not in program.decisions or node.role is Role.MOVE:
        return False
    return not program.decisions[node].reason.startswith(free)


def moved(program: Program, node: Node) -> Iterator[tuple[int, int]]:
    """Pairs of a value and what a node makes of it without computing with it."""
    if node.link in (Link.SLICE, Link.STACK, Link.JOIN, Link.INVARIANT):
        yield from ((v, out) for v in node.ins for out in node.outs)
    elif node.role is Role.MOVE and not _is_sent(program, node):
        yield from node.moves


def _is_sent(program: Program, node: Node) -> bool:
    return program.decisions[node].reason.startswith("sent in")


def taken_wide(program: Program) -> set[int]:
    """Values that are read by more than operations that round them first."""
    taken = set(program.graph.outputs)
    before = None
    while before != (before := len(taken)):
        for node in reversed(program.nodes):
            taken.update(_takes_wide(program, node, taken))
    return taken


def _takes_wide(program: Program, node: Node, taken: set[int]) -> Iterator[int]:
    pairs = list(moved(program, node))
    if pairs:
        yield from (v for v, out in pairs if out in taken)
    elif node in program.decisions:
        operands = zip(node.ins, program.decisions[node].operands, strict=True)
        yield from (v for v, precision in operands if not is_narrow(precision))
    else:
        yield from node.ins
