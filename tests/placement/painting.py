"""The painting of TensorFlow's mixed-precision pass, on the same program under the same pins.

It knows four kinds of operation: those to lower, those to keep, those that are safe if what they
read is, and those that compute nothing. Lowered are the first; then whatever safe or empty lies
between two of them and not after a kept one; then what is empty around them. Where a loop's carry
is not painted from end to end, it is not painted at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from jaxamp.core.formats import is_narrow
from jaxamp.plan.graph.graph import Node, Role
from tests.placement.extract import Placing
from tests.placement.problem import NARROW, Problem
from tests.placement.program import Program

Nodes = set[Node]


def painted(program: Program, place: Placing, problem: Problem) -> list[bool]:
    """The labels that the painting gives.

    Args:
      program: what is painted.
      place: which labels stand for its values.
      problem: which of these have to be wide.
    """
    nodes = _paint(program, place.label, problem)
    labels = [label != NARROW for label in range(len(problem.elements))]
    for node in nodes:
        for value in node.outs:
            if value in place.label:
                labels[place.label[value]] = place.label[value] in problem.pinned
    for value, label in place.waiting.items():
        later = [r for r in program.graph.readers[value] if program.is_far(value, r)]
        wide = labels[place.label[value]] and not all(r in nodes for r in later)
        labels[label] = wide or label in problem.pinned
    return labels


def _paint(program: Program, label: Mapping[int, int], problem: Problem) -> Nodes:
    allowed = {n for n in program.nodes if n.role is Role.CONTRACT and _is_lowered(program, n)}
    denied = {n for n in program.nodes if n not in allowed and _is_kept(label, problem, n)}
    empty = {n for n in program.nodes if n.role in (Role.MOVE, Role.LINK)} - denied
    safe = set(program.nodes) - allowed - denied
    after, before = _neighbours(program)
    denied |= _flood(denied, after, safe) - empty
    between = safe - denied
    lowered = allowed | _flood(allowed, after, between) & _flood(allowed, before, between)
    lowered |= _flood(lowered, lambda n: [*after(n), *before(n)], empty - denied)
    return _matched(program, lowered)


def _is_lowered(program: Program, node: Node) -> bool:
    return any(is_narrow(precision) for precision in program.decisions[node].operands)


def _is_kept(label: Mapping[int, int], problem: Problem, node: Node) -> bool:
    """Whether a result has to be wide, or none is a float32 array."""
    labels = [label[v] for v in node.outs if v in label]
    return not labels or not problem.pinned.isdisjoint(labels)


def _neighbours(program: Program) -> tuple[Callable[[Node], list[Node]], ...]:
    """The functions that give the readers of a node's results, and the makers of its operands."""
    known = set(program.nodes)
    makers: dict[int, list[Node]] = {}
    for node in program.nodes:
        for value in node.outs:
            makers.setdefault(value, []).append(node)

    def after(node: Node) -> list[Node]:
        return [r for v in node.outs for r in program.graph.readers[v] if r in known]

    def before(node: Node) -> list[Node]:
        return [m for v in node.ins for m in makers.get(v, ())]

    return after, before


def _flood(start: Iterable[Node], step: Callable[[Node], list[Node]], within: Nodes) -> Nodes:
    """What can be reached from some nodes by way of others."""
    found: Nodes = set()
    pending = list(start)
    while pending:
        new = [n for n in step(pending.pop()) if n in within and n not in found]
        found.update(new)
        pending += new
    return found


def _matched(program: Program, lowered: Nodes) -> Nodes:
    """Without the carries that are painted in part."""
    for carry in program.graph.carries:
        values = (carry.inner, carry.result)
        links = {n for n in program.nodes if n.role is Role.LINK and set(n.outs) & set(values)}
        if not links <= lowered:
            lowered = lowered - links
    return lowered
