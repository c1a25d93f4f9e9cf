"""Bytes that a compiled program sends between devices, by collective and dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from jaxamp.compiled.hlo import Array, Computation, Instruction, Module
from jaxamp.compiled.traffic import trips

Bytes = Counter[tuple[str, str]]

_OPS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_FUSED = "all-reduce-scatter"  # what a TPU's compiler calls a fused reduce-scatter
_SCALARS = 1024  # smaller arrays are losses and flags, not parameters


def collectives(module: Module) -> Bytes:
    """Bytes by collective and element type; loops count as often as they run.

    The size of a collective is that of the whole array: what an all-gather gives and what the
    others take. Arrays of less than a kilobyte are left out. A collective that the compiler has
    spread over several fusions, to overlap it with them, is named in each and counts once.

    Raises:
      ValueError: the program does not say how often a loop runs.
    """
    found: Bytes = Counter()
    spread = set()
    for op, array, runs, channel in _collectives(module, module.entry, 1):
        if array.bytes < _SCALARS or (channel, str(array)) in spread:
            continue
        if channel:
            spread.add((channel, str(array)))
        found[op, array.dtype] += runs * array.bytes
    return found


def _collectives(
    module: Module, computation: Computation, runs: int, fused: bool = False
) -> Iterator[tuple[str, Array, int, str]]:
    """Name, array, how often it runs, and inside of fusions the channel that tells it apart."""
    for line in computation.instructions:
        op = line.op.removesuffix("-start")
        if op in _OPS:
            scatters = op == "all-reduce" and _FUSED in computation.name
            name = "reduce-scatter" if scatters else op
            channel = line.attribute("channel_id") if fused else ""
            yield from ((name, array, runs, channel) for array in _whole(computation, line, op))
        elif line.op == "while":
            body = module.inside(line, "body")
            yield from _collectives(module, body, runs * _trips(module, line))
        else:
            for callee in _called(line):
                inside = fused or line.op == "fusion"
                yield from _collectives(module, module.computations[callee], runs, inside)


def _trips(module: Module, loop: Instruction) -> int:
    found = trips(module, loop)
    if found is None:
        raise ValueError(f"how often {loop.name} runs, of {loop.source}, the program does not say")
    return found


def _whole(computation: Computation, line: Instruction, op: str) -> list[Array]:
    operands = [computation.by_name[name] for name in line.operands if name in computation.by_name]
    taken = [array for operand in operands for array in operand.results]
    if op != "all-gather":
        return taken
    given = list(line.results)
    return given[len(taken) :] if line.op.endswith("-start") else given


def _called(line: Instruction) -> list[str]:
    if line.op in ("fusion", "async-start"):
        return [line.attribute("calls")]
    if line.op == "call":
        return [line.attribute("to_apply")]
    return line.branches if line.op == "conditional" else []
