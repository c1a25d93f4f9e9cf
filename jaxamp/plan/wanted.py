"""In which precision the readers of a value take it, where they all take it in one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set

from jaxamp.formats import Precision
from jaxamp.plan.choose import Choice
from jaxamp.plan.graph import Graph, Link, Node, Role, movements

F32 = Precision.F32

Choices = Mapping[Node, Choice]
Storage = Sequence[Precision | None]


def is_handed_on(node: Node, choices: Choices, links: Collection[Link]) -> bool:
    """Whether what a node reads becomes what it makes: by movement or one of some links."""
    return node.link in links or (node.role is Role.MOVE and choices[node].operand is None)


def handed_on(node: Node, choices: Choices, links: Collection[Link]) -> Iterable[tuple[int, int]]:
    """Pairs of an operand and the result that it becomes, by movement or one of some links."""
    if not is_handed_on(node, choices, links):
        return ()
    return movements(node) if node.link is None else [(value, node.outs[0]) for value in node.ins]


def find_wanted(
    graph: Graph, stored: Storage, choices: Choices, links: Collection[Link]
) -> list[Precision]:
    """The narrow precision in which every reader takes a value; f32 where there is no such."""
    wanted = [p or F32 for p in stored]
    needed = graph.outputs | graph.onward | graph.indices | graph.predicates
    unread = bytearray(len(graph.nodes))
    for node in reversed(graph.nodes):
        unread[node.index] = _is_unread(graph, needed, unread, node)
        for value in node.outs:
            if graph.ours[value] and stored[value] is F32:
                taken = set(_taken(graph, stored, wanted, choices, links, unread, value))
                wanted[value] = taken.pop() if len(taken) == 1 else F32
    return wanted


def _taken(
    graph: Graph,
    stored: Storage,
    wanted: Sequence[Precision],
    choices: Choices,
    links: Collection[Link],
    unread: bytearray,
    value: int,
) -> Iterator[Precision]:
    """The precision in which each reader takes a value that is itself read."""
    if value in graph.outputs or value in graph.onward:
        yield F32
    for reader in graph.uses[value]:
        if unread[reader.index]:
            continue
        outs = [out for source, out in handed_on(reader, choices, links) if source == value]
        if outs:
            yield from (wanted[out] for out in outs)
        elif reader.role is Role.LINK:
            yield stored[reader.outs[0]] or F32
        else:
            yield choices[reader].operand or F32


def _is_unread(graph: Graph, needed: Set[int], unread: bytearray, node: Node) -> bool:
    """Whether nothing needs what a node makes: what a program leaves over, XLA drops."""
    if node.link is Link.BACK or (node.eqn is not None and node.eqn.effects):
        return False
    if not needed.isdisjoint(node.outs):
        return False
    return all(unread[reader.index] for value in node.outs for reader in graph.uses[value])
