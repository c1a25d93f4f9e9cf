"""Say where a compiled program's bytes go: the kernels that move most, the buffers at the peak."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path

from jaxamp.compiled.hlo import Array, Instruction, Module
from jaxamp.compiled.traffic import Kernel, kernels

_MIB = 2**20
_LIVE = re.compile(r"^ +(\S+?)\{([\d,]*)\}(?:@\d+)?: (\d+) bytes", re.M)


def by_array(
    found: Iterable[Kernel],
) -> tuple[Counter[tuple[str, int]], dict[tuple[str, int], str]]:
    """Bytes moved for each (dtype, elements), and one shape as an example of each.

    Reshaped arrays are one: the compiler is free in the dimensions, not in the elements.
    """
    moved: Counter[tuple[str, int]] = Counter()
    example: dict[tuple[str, int], str] = {}
    for kernel in found:
        for array, size in kernel.read + kernel.written:
            key = (array.dtype, prod(array.dims))
            moved[key] += kernel.runs * size
            example.setdefault(key, str(array))
    return moved, example


def report(module: Module, live_ranges: str, count: int = 40) -> str:
    """The kernels that move most, bytes by array, and the buffers alive at the peak.

    Args:
        module: the compiled program.
        live_ranges: the compiler's own listing of what is alive when, or "".
        count: rows in each list.
    """
    found = sorted(kernels(module), key=lambda kernel: -kernel.moved)
    moved, example = by_array(found)
    lines = ["# bytes moved, by array: MiB, dtype and shape"]
    lines += [f"{n / _MIB:10.1f}  {example[key]}" for key, n in moved.most_common(count)]
    lines += ["", "# kernels: MiB, runs, what, reads -> writes, from"]
    lines += [_kernel(kernel) for kernel in found[:count]]
    lines += ["", "# alive at the peak: MiB, name, shape, from"]
    lines += [f"{n / _MIB:10.1f}  {name}  {what}" for name, what, n in peak(module, live_ranges)]
    return "\n".join(lines) + "\n"


def compare(module: Module, other: Module, count: int = 15) -> str:
    """Arrays for which a program moves more than another, and those for which it moves less."""
    moved, example = by_array(kernels(module))
    against, other_example = by_array(kernels(other))
    names = other_example | example
    change = {key: moved[key] - against[key] for key in moved | against}
    order = sorted(change, key=lambda key: -abs(change[key]))[:count]
    rows = [
        f"{change[key] / _MIB:+10.1f} MiB  {names[key]}"
        f"  ({moved[key] / _MIB:.1f} against {against[key] / _MIB:.1f})"
        for key in order
        if abs(change[key]) >= _MIB
    ]
    return "\n".join(rows)


def peak(module: Module, live_ranges: str, least: int = _MIB) -> Iterator[tuple[str, str, int]]:
    """Name, description and bytes of every buffer of some size that is alive at the peak."""
    where = {
        line.name: line
        for computation in module.computations.values()
        for line in computation.instructions
    }
    _, _, listing = live_ranges.partition("(peak):")
    for name, element, size in _LIVE.findall(listing.partition("Stack trace")[0]):
        if int(size) >= least:
            line = where.get(name)
            yield name, _describe(line, element) if line else "?", int(size)


def live_ranges_in(folder: Path) -> str:
    """The compiler's listing of live ranges among its dumps: the longest is the whole program's."""
    texts = [path.read_text() for path in folder.glob("*live-range.txt")]
    return max(texts, key=len, default="")


def _describe(line: Instruction, element: str) -> str:
    array = line.results[int(element.split(",")[0])] if element and line.results else None
    shape = array or (line.results[0] if line.results else "")
    return f"{shape}  {line.source}"


def _kernel(kernel: Kernel) -> str:
    line = kernel.instruction
    moved = f"{_arrays(kernel.read)} -> {_arrays(kernel.written)}"
    what = line.target or line.op
    return (
        f"{kernel.moved / _MIB:10.1f}  {kernel.runs:4d}  {what} {line.name}  {moved}  {line.source}"
    )


def _arrays(moved: tuple[tuple[Array, int], ...]) -> str:
    shown = [str(a) if n == a.bytes else f"{a} ({n / _MIB:.1f})" for a, n in moved if n >= 1024]
    return ", ".join(shown)
