"""What a program leaves to be placed.

A value is in memory where a kernel makes it or reads it, where a loop or branch hands it on, where
it goes to another device, where it is a result, and where it waits for a later kernel. What is only
moved waits as what it was moved from, and what is made of the program's inputs alone, or what the
plan computes again, waits as what it was made from; so it is for everyone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxamp.core.formats import is_narrow
from jaxamp.plan.dataflow.lookups import is_repeated_gather
from jaxamp.plan.graph.graph import Link, Node, Role
from tests.placement.grounds import PLACEMENT, SMALL, accurate, taken_wide
from tests.placement.problem import NARROW, WIDE, Problem
from tests.placement.program import SENT, Program, is_kernel, is_window, picks

HANDED_IN = (Link.INVARIANT, Link.SLICE)


@dataclass(frozen=True)
class Placing:
    """The problem of a program.

    Attributes:
      problem: what is to be labelled.
      label: the label of each value.
      waiting: the label of what waits of a value for later kernels.
      gainful: the problem if the guard against rewriting for little gain is a ground as well.
    """

    problem: Problem
    label: dict[int, int]
    waiting: dict[int, int]
    gainful: Problem


def placing(program: Program) -> Placing:
    """What is to be placed in a program, where only accuracy is a ground."""
    found = _Finder(program)
    for node in program.nodes:
        found.look(node)
    return found.placing()


class _Finder:
    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, program.graph
        self.taken = taken_wide(program)
        self.elements = [0, 0]
        self.label: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.stored: list[tuple[int, int]] = []
        self.fused: dict[tuple[int, int], None] = {}
        for node in program.nodes:
            for value in (*node.ins, *node.outs):
                self._enter(value)

    def _enter(self, value: int) -> None:
        graph = self.graph
        made = value in graph.sources or value in self.program.makers
        if made and graph.is_float32[value] and value not in self.label:
            self.label[value] = self._new(graph.sizes[value] * self.program.runs[value])

    def _new(self, elements: int) -> int:
        self.elements.append(elements)
        return len(self.elements) - 1

    def look(self, node: Node) -> None:
        """Notes what a node reads from memory and writes to it."""
        ins = [v for v in node.ins if v in self.label]
        outs = [self.label[v] for v in node.outs if v in self.label]
        if not is_kernel(self.graph, node):
            self._fuse(node, ins, outs)
        elif is_repeated_gather(self.graph, node):
            self._store(ins)
            self._fuse(node, ins, outs)
        elif node.role is Role.CONTRACT:
            self._store(node.outs)
            operands = self.program.decisions[node].operands
            for value, precision in zip(node.ins, operands, strict=True):
                self._store_as([value], NARROW if is_narrow(precision) else WIDE)
        elif node.role is Role.FIXED:
            self._store(node.outs)
            self._store_as(ins, WIDE)
        elif is_window(self.graph, node) and node.trait not in SENT:
            if picks(self.graph, node):  # a sum of many takes what it reads wide, and fused
                for value in ins:
                    self._copy(value)
        elif node.link is not Link.RESULT:  # which is its carry
            if node.link not in (*HANDED_IN, Link.BACK):
                self._store(node.outs)
            # A loop gets the rounding of what is the same in every turn, if it reads no more; what
            # is one number everywhere it makes anew.
            is_number = node.ins[0] in self.graph.constants
            if node.link is not Link.INVARIANT or (node.outs[0] in self.taken and not is_number):
                for out in outs:
                    self._store_as(ins, out)

    def _store(self, values: Sequence[int]) -> None:
        for value in values:
            if value in self.label:
                self.stored.append((self.label[value], self.label[value]))

    def _store_as(self, values: Sequence[int], label: int) -> None:
        self.stored += [(self.label[v], label) for v in values if v in self.label]

    def _fuse(self, node: Node, ins: Sequence[int], outs: Sequence[int]) -> None:
        for value in ins:
            self.fused.update(dict.fromkeys((self.label[value], out) for out in outs))
            if self.program.is_far(value, node):
                self._wait(value)

    def _wait(self, value: int) -> None:
        program, maker = self.program, self.program.makers.get(value)
        if maker is None or maker.link in HANDED_IN or value in program.recomputed:
            return
        is_fused = not is_kernel(self.graph, maker)
        if is_fused and maker.role is Role.MOVE:
            for source in maker.ins:
                if source in self.label:
                    self._wait(source)
        elif not is_fused or program.through[value]:
            self._copy(value)

    def _copy(self, value: int) -> None:
        if value not in self.waiting:
            label = self.waiting[value] = self._new(0)
            self.stored.append((self.label[value], label))
            self.fused[self.label[value], label] = None

    def placing(self) -> Placing:
        """All that was found."""
        graph, label = self.graph, self.label
        self._store_as([v for v in graph.outputs if v not in graph.sources], WIDE)
        pinned = self._labels(accurate(self.program))
        carries = [(c.inner, c.result) for c in graph.carries]
        given = {v for v in graph.sources if v not in self.program.makers}
        for node in self.program.nodes:
            if node.link in HANDED_IN and node.ins[0] in given:
                given.update(node.outs)
        problem = Problem(
            elements=tuple(self.elements),
            given=frozenset(label[v] for v in given if v in label),
            pinned=frozenset(pinned),
            equal=tuple((label[a], label[b]) for a, b in carries if a in label and b in label),
            stored=tuple(self.stored),
            fused=tuple(self.fused),
        )
        gainful = tuple(reason for reason in PLACEMENT if reason not in SMALL)
        more = self._labels(accurate(self.program, gainful))
        return Placing(problem, label, self.waiting, replace(problem, pinned=frozenset(more)))

    def _labels(self, values: set[int]) -> set[int]:
        waiting = {w for v, w in self.waiting.items() if v in values}
        return waiting | {self.label[v] for v in values if v in self.label}
