"""Bytes that a compiled program sends between devices, by collective and dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from jaxamp.estimate.hlo import Array, Computation, Instruction, Module
from jaxamp.estimate.traffic import trips

Bytes = Counter[tuple[str, str]]

_OPS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_FUSED = "all-reduce-scatter"  # what a TPU's compiler calls a fused reduce-scatter
_SCALARS = 1024  # smaller arrays are losses and flags, not parameters


def collectives(module: Module) -> Bytes:
    """Bytes by collective and element type; loops count as often as they run.

    The size of a collective is that of the whole array: what an all-gather gives and what the
    others take. Arrays of less than a kilobyte are left out.
    """
    found: Bytes = Counter()
    for op, array, runs in _collectives(module, module.entry, 1):
        if array.bytes >= _SCALARS:
            found[op, array.dtype] += runs * array.bytes
    return found


def _collectives(
    module: Module, computation: Computation, runs: int
) -> Iterator[tuple[str, Array, int]]:
    for line in computation.instructions:
        op = line.op.removesuffix("-start")
        if op in _OPS:
            fused = op == "all-reduce" and _FUSED in computation.name
            name = "reduce-scatter" if fused else op
            yield from ((name, array, runs) for array in _whole(computation, line, op))
        elif line.op == "while":
            body = module.computations[line.attribute("body") or ""]
            yield from _collectives(module, body, runs * (trips(module, line) or 1))
        else:
            for callee in _called(line):
                yield from _collectives(module, module.computations[callee], runs)


def _whole(computation: Computation, line: Instruction, op: str) -> list[Array]:
    operands = [computation.by_name[name] for name in line.operands if name in computation.by_name]
    taken = [array for operand in operands for array in operand.results]
    if op != "all-gather":
        return taken
    given = list(line.results)
    return given[len(taken) :] if line.op.endswith("-start") else given


def _called(line: Instruction) -> list[str]:
    if line.op in ("fusion", "async-start"):
        return [name for name in [line.attribute("calls")] if name]
    if line.op == "call":
        return [name for name in [line.attribute("to_apply")] if name]
    return line.branches if line.op == "conditional" else []
