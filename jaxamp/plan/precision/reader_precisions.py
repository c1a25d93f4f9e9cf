"""Find the one precision in which all readers of a value take it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from jaxamp.core.formats import Precision
from jaxamp.plan.dataflow.uses import Uses
from jaxamp.plan.graph.graph import Graph, Node, Role
from jaxamp.plan.precision.choose import Choice

F32 = Precision.F32

Choices = Mapping[Node, Choice]
Storage = Sequence[Precision | None]


def is_forwarded(node: Node, choices: Choices, links: Collection[str]) -> bool:
    """Return whether a node passes its operand on, by movement or one of some links."""
    return node.link in links or (node.role is Role.MOVE and choices[node].operand is None)


def forwarded(node: Node, choices: Choices, links: Collection[str]) -> Iterable[tuple[int, int]]:
    """Return pairs of an operand and the result that it becomes, by movement or some links."""
    if not is_forwarded(node, choices, links):
        return ()
    return node.moves if node.link is None else [(value, node.outs[0]) for value in node.ins]


class ReaderPrecisions:
    """The narrow precision in which every reader takes a value; float32 where there is none.

    Args:
      graph: the program.
      uses: what each value is used for; values that nothing needs read nothing.
      stored: precision in which each value is stored.
      choices: what was chosen for each node.
      links: those through which a value is passed on as it is.
    """

    def __init__(
        self, graph: Graph, uses: Uses, stored: Storage, choices: Choices, links: Collection[str]
    ) -> None:
        self.graph, self.uses, self.stored = graph, uses, stored
        self.choices, self.links = choices, links
        self._precisions = [p or F32 for p in stored]
        for node in reversed(graph.nodes):
            for value in node.outs:
                if graph.is_float32[value] and stored[value] is F32:
                    found = set(self.precisions_of(value, graph.readers[value]))
                    self._precisions[value] = found.pop() if len(found) == 1 else F32

    def __getitem__(self, value: int) -> Precision:
        return self._precisions[value]

    def precisions_of(self, value: int, readers: Iterable[Node]) -> Iterator[Precision]:
        """Yield the precisions in which readers, and the program's results, take a value."""
        if value in self.graph.outputs or value in self.graph.onward:
            yield F32
        for reader in filter(self.uses.needs, readers):
            moved = forwarded(reader, self.choices, self.links)
            outs = [out for source, out in moved if source == value]
            if outs:
                yield from (self[out] for out in outs)
            elif reader.role is Role.LINK:
                yield self.stored[reader.outs[0]] or F32
            elif reader.role is Role.MOVE:  # sends it, perhaps narrow
                yield self.choices[reader].accumulation or F32
            else:
                yield self.choices[reader].operand or F32
