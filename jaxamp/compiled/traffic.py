"""Count what a compiled program moves: the bytes that its kernels read and write, and the kernels.

A kernel is an instruction that stands alone in the entry computation, or in the body of a loop, a
branch or a call that the entry reaches. A loop's body counts as often as the loop runs: XLA writes
the trip count of a counted loop (every `lax.scan`) into the program; where it is missing, the
loop's condition is read, and a loop that cannot be understood counts once and is reported so.

What a kernel moves is its operands and its results, except for the part of an operand that is never
touched: a slice or gather reads only what it returns, also of what the kernel computes element by
element, slices or joins before (of each part a share), and an update in place writes only what
changed. Without this, a scan over layers would be charged for all layers at every step. Scratch
space of library calls and on-chip buffers of a TPU are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from jaxamp.compiled.contractions import LIBRARY, Contraction, contractions
from jaxamp.compiled.hlo import Array, Computation, Instruction, Module

_FREE = {
    "add-dependency", "after-all", "bitcast", "constant", "get-tuple-element", "iota",
    "opt-barrier", "parameter", "partition-id", "replica-id", "tuple",
}  # fmt: skip
WORDS = {"f8e4m3fn": "f8_e4m3", "f8e5m2": "f8_e5m2", "f4e2m1fn": "f4_e2m1"}
"""Names of formats in jaxamp, by those of the compiler where they differ."""

_ELEMENT_BY_ELEMENT = {
    "abs", "add", "and", "bitcast", "clamp", "compare", "concatenate", "convert", "copy", "divide",
    "exponential", "get-tuple-element", "log", "logistic", "maximum", "minimum", "multiply",
    "negate", "not", "or", "power", "reshape", "rsqrt", "select", "sqrt", "subtract", "tanh",
    "transpose",
}  # fmt: skip
_SLICES = {"dynamic-slice", "slice", "gather"}
_STARTED = {"copy-start": 0, "slice-start": 1}  # which of its results is not its operand


@dataclass(frozen=True, slots=True)
class Kernel:
    """One top-level instruction, how often it runs, and the bytes of each array that it moves."""

    instruction: Instruction
    runs: int
    read: tuple[tuple[Array, int], ...]
    written: tuple[tuple[Array, int], ...]

    @property
    def moved(self) -> int:
        """Bytes in all runs."""
        return self.runs * sum(size for _, size in self.read + self.written)

    def contractions(self, module: Module) -> list[Contraction]:
        """Return the dots and convolutions of one run."""
        return list(contractions(module, self.instruction))


@dataclass(frozen=True, slots=True)
class Traffic:
    """The sums over a program."""

    bytes: int
    kernels: int
    dots: dict[str, int]
    flops: float
    unknown_loops: int


def kernels(module: Module) -> Iterator[Kernel]:
    """Return every kernel of a program."""
    return _kernels(module, module.entry, 1)


def measure(module: Module) -> Traffic:
    """Count a program."""
    found = list(kernels(module))
    dots: Counter[str] = Counter()
    flops = 0.0
    for kernel in found:
        for contraction in kernel.contractions(module):
            word = contraction.operands[0]
            dots[WORDS.get(word, word)] += kernel.runs
            flops += kernel.runs * contraction.flops
    return Traffic(
        bytes=sum(kernel.moved for kernel in found),
        kernels=sum(kernel.runs for kernel in found),
        dots=dict(dots),
        flops=flops,
        unknown_loops=sum(
            line.op == "while" and trips(module, line) is None
            for computation in module.computations.values()
            for line in computation.instructions
        ),
    )


def trips(module: Module, loop: Instruction) -> int | None:
    """Return how many iterations a loop runs, or None where the program does not say."""
    if loop.known_trips is not None:
        return loop.known_trips
    condition = module.inside(loop, "condition")
    compare = condition.root
    if compare.op != "compare" or "direction=LT" not in compare.attributes:
        return None
    bound = condition.by_name.get(compare.operands[1])
    return int(bound.arguments) if bound and bound.op == "constant" else None


def _kernels(module: Module, computation: Computation, runs: int) -> Iterator[Kernel]:
    for line in computation.instructions:
        if line.op in _FREE or line.op.endswith("-done"):
            continue
        if line.op == "while":
            body = module.inside(line, "body")
            yield from _kernels(module, body, runs * (trips(module, line) or 1))
        elif line.op == "conditional":
            options = [list(_kernels(module, module.computations[b], runs)) for b in line.branches]
            yield from max(options, key=lambda option: sum(k.moved for k in option), default=[])
        elif line.op in ("call", "async-start"):
            callee = module.inside(line, "to_apply" if line.attribute("to_apply") else "calls")
            yield from _kernels(module, callee, runs)
        else:
            yield Kernel(line, runs, tuple(_read(module, line)), tuple(_written(module, line)))


def _size(line: Instruction) -> int:
    return sum(array.bytes for array in line.results)


def _in_memory(line: Instruction) -> list[Array]:
    """Return an instruction's results in main memory, without scratch space of libraries."""
    scratch = bool(LIBRARY.search(line.target))
    return [a for a in line.results if not (a.on_chip or (scratch and a.dtype == "s8"))]


def _read(module: Module, line: Instruction) -> Iterator[tuple[Array, int]]:
    operands = [_viewed(line.home.by_name.get(name)) for name in line.operands]
    for operand in dict.fromkeys(operands):
        if operand is None or not (stored := _in_memory(operand)):
            continue
        positions = [i for i, other in enumerate(operands) if other is operand]
        touched = sum(_touched(module, line, i) for i in positions)
        yield stored[0], min(sum(a.bytes for a in stored), touched)


def _viewed(line: Instruction | None) -> Instruction | None:
    """Return what is in memory, of which an instruction may be another view."""
    while line is not None and line.op == "bitcast":
        line = line.home.by_name.get(line.operands[0])
    return line


def _written(module: Module, line: Instruction) -> Iterator[tuple[Array, int]]:
    if line.op in _STARTED:
        results = (line.results[_STARTED[line.op]],)
        stored = [array.bytes for array in results]
    else:
        made = module.inside(line).root if line.op == "fusion" else line
        results, stored = line.results, _stored(made)
    kept = _in_memory(line)
    for array, size in zip(results, stored, strict=True):
        if array in kept:
            yield array, size


def _touched(module: Module, line: Instruction, position: int) -> int:
    """Return the bytes that an instruction reads of one operand."""
    if line.op in _SLICES and position == 0:
        return _size(line)
    if line.op == "slice-start":
        return line.results[_STARTED[line.op]].bytes
    if line.op == "dynamic-update-slice" and position == 0:
        return 0
    if line.op == "scatter" and position == 0:
        return _updates(line)
    if line.op == "fusion":
        return _touched_inside(module, module.inside(line).parameters[position])
    return _size(line.input(position))


def _touched_inside(module: Module, value: Instruction) -> int:
    """Return the bytes of a fused value that its users read; all of it as soon as one reads all."""
    if value is value.home.root:
        return _size(value)
    total = 0
    for user in value.home.users[value.name]:
        is_part = user.op in _SLICES and user.operands[0] == value.name
        if is_part or user.op in _ELEMENT_BY_ELEMENT:
            touched = _touched_inside(module, user)
            total += touched if is_part else touched * _size(value) // max(_size(user), 1)
            continue
        for position, name in enumerate(user.operands):
            if name == value.name:
                total += _touched(module, user, position)
    return min(total, _size(value))


def _stored(line: Instruction) -> list[int]:
    """Return for each result the bytes that change in memory when it is stored."""
    if line.op == "tuple":
        parts = map(line.input, range(len(line.operands)))
        return [size for part in parts for size in _stored(part)]
    if line.op == "bitcast":
        return _stored(line.input(0))
    if line.op == "dynamic-update-slice":
        return [_size(line.input(1))]
    if line.op == "scatter" and len(line.results) == 1:
        return [_updates(line)]
    return [array.bytes for array in line.results]


def _updates(scatter: Instruction) -> int:
    """Return the bytes of a scatter's updates: the last third of its operands."""
    positions = range(len(scatter.operands))
    return sum(_size(scatter.input(n)) for n in positions[-((len(positions) - 1) // 2) :])
