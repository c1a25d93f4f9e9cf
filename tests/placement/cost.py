"""What a labelling costs: the bytes of what is in memory, each value once in each format."""

from __future__ import annotations

from tests.placement.problem import Labels, Problem

BYTE = 256
"""The unit of cost is a cast of one element between fused operations: almost nothing."""

BYTES = {False: 2 * BYTE, True: 4 * BYTE}
"""Of an element, narrow or wide."""


def cost(problem: Problem, labels: Labels) -> int:
    """The cost of a labelling, in units of which ``BYTE`` make a byte."""
    stored = {(value, labels[label]) for value, label in problem.stored}
    stored -= {(value, True) for value in problem.given}
    casts = {value for value, label in problem.fused if labels[label] != labels[value]}
    elements = problem.elements
    return sum(elements[v] * BYTES[wide] for v, wide in stored) + sum(elements[v] for v in casts)


def stored_bytes(problem: Problem, labels: Labels) -> int:
    """The bytes alone, without the casts between fused operations."""
    stored = {(value, labels[label]) for value, label in problem.stored}
    stored -= {(value, True) for value in problem.given}
    return sum(problem.elements[v] * BYTES[wide] for v, wide in stored) // BYTE
