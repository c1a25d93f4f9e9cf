"""How a plan labels its program."""

from __future__ import annotations

from collections.abc import Iterable

from jaxamp.core.formats import Precision, is_narrow
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.graph.graph import Node
from tests.placement.extract import Placing
from tests.placement.grounds import moved
from tests.placement.problem import NARROW
from tests.placement.program import Program


def planned(program: Program, placing: Placing) -> list[bool]:
    """The labels that a program's plan gives: what is stored, and the copies that wait."""
    labels = [label != NARROW for label in range(len(placing.problem.elements))]

    def enter(values: Iterable[int], precisions: Iterable[Precision | None]) -> None:
        for value, precision in zip(values, precisions, strict=True):
            if value in placing.label:
                labels[placing.label[value]] = not is_narrow(precision)

    for node, decision in program.decisions.items():
        enter(node.outs, [decision.sent or precision for precision in decision.outputs])
    for nest, decision in program.nests:
        if nest.op.trait is Trait.LOOP:
            enter(nest.entries, decision.operands)
        if nest.op.trait in (Trait.LOOP, Trait.BRANCH):
            enter(nest.outs, decision.outputs)
    for value, label in placing.waiting.items():
        copied = all(_is_copied(program, value, reader) for reader in program.graph.readers[value])
        labels[label] = labels[placing.label[value]] and not copied
    return labels


def _is_copied(program: Program, value: int, reader: Node) -> bool:
    """Whether later readers of a value, or of what one moves it to, read a narrow copy."""
    if reader not in program.decisions:
        return True
    if not program.is_far(value, reader):
        return all(
            _is_copied(program, out, later)
            for source, out in moved(program, reader)
            if source == value
            for later in program.graph.readers[out]
        )
    return is_narrow(program.decisions[reader].plan.reads[reader.ins.index(value)].copy)
