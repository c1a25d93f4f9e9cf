"""What travels between devices in a narrow format, because all that read it there take it so.

A device that gathers a parameter for its matrix products would round the whole of it on arrival.
Rounding the parts before they are sent gives the same numbers for half of the bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from jaxamp.formats import Precision
from jaxamp.plan.choose import Choice
from jaxamp.plan.facts import movements
from jaxamp.plan.graph import Graph, Link, Node, Role
from jaxamp.policy import PrecisionPolicy
from jaxamp.taxonomy import Trait

F32 = Precision.F32
_HANDED_ON = (Link.INVARIANT, Link.SLICE)


def find_travels(
    graph: Graph,
    policy: PrecisionPolicy,
    stored: Sequence[Precision | None],
    choices: Mapping[Node, Choice],
) -> dict[Node, Choice]:
    """The choices for collectives, with the precision in which they send.

    Args:
      graph: the program.
      policy: whose sums over devices may be narrow too; a cast of a variable's device type sends
        nothing, but its transpose is such a sum.
      stored: precision in which each value is stored.
      choices: what was chosen for each node, which is left as it is.
    """
    traits = {Trait.COLLECTIVE}
    if policy.allreduce.bits < F32.bits:
        traits.add(Trait.VARY)
    nodes = [n for n in graph.nodes if n.trait in traits and choices[n].operand is None]
    if not nodes:
        return {}
    wanted = _find_wanted(graph, stored, choices)
    return {
        node: _travelling(choices[node], wanted[node.outs[0]])
        for node in nodes
        if len(node.outs) == 1 and stored[node.ins[0]] is F32 and wanted[node.outs[0]] is not F32
    }


def _travelling(choice: Choice, low: Precision) -> Choice:
    reason = f"travels in {low.short}, in which all that read it take it"
    return dataclasses.replace(choice, operand=F32, reason=reason, accumulation=low)


def _find_wanted(
    graph: Graph, stored: Sequence[Precision | None], choices: Mapping[Node, Choice]
) -> list[Precision]:
    """The narrow precision in which every reader takes a value; f32 where there is no such."""
    wanted = [p or F32 for p in stored]
    for node in reversed(graph.nodes):
        for value in node.outs:
            if graph.ours[value] and stored[value] is F32:
                taken = set(_taken(graph, stored, wanted, choices, value))
                wanted[value] = taken.pop() if len(taken) == 1 else F32
    return wanted


def _taken(
    graph: Graph,
    stored: Sequence[Precision | None],
    wanted: Sequence[Precision],
    choices: Mapping[Node, Choice],
    value: int,
) -> Iterator[Precision]:
    """The precision in which each reader takes a value."""
    if value in graph.outputs or value in graph.onward:
        yield F32
    for reader in graph.uses[value]:
        operand = choices[reader].operand
        if reader.role is Role.LINK:
            (out,) = reader.outs
            yield (wanted if reader.link in _HANDED_ON else stored)[out] or F32
        elif operand is None and reader.role is Role.MOVE:
            yield from (wanted[out] for source, out in movements(reader) if source == value)
        else:
            yield operand or F32
