"""Charts of a report as numbers: bars that consist of parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxamp.display.numbers import amount, near, share, storage
from jaxamp.inspect.count import Tally
from jaxamp.inspect.operation import Operation, grouped
from jaxamp.inspect.report import Report

_MOST = 10  # bars of a chart
_FLOATS = ("f64", "f32", "f16", "bf16")
_LOW = "f8"
OTHER = "other"  # integers, booleans, keys


class Part(NamedTuple):
    """A part of a bar: the precision that colours it, its share of the chart, and what it says."""

    precision: str
    share: float
    title: str


class Bar(NamedTuple):
    """One bar: its name, its parts, and the number at its end."""

    name: str
    parts: tuple[Part, ...]
    end: str


class Chart(NamedTuple):
    """A chart and its title."""

    title: str
    bars: tuple[Bar, ...]


def charts(report: Report) -> list[Chart]:
    """Return the charts: shares, bytes by kind, FLOPs by scope and by line, and guards."""
    operations = report.operations
    return [
        _shares(operations),
        _grouped("operations by guard", operations, lambda o: o.guard or "(none)", _OPERATIONS),
        _grouped("bytes by kind, before fusion", operations, lambda o: o.kind, _BYTES),
        _grouped("FLOPs by scope", operations, lambda o: o.scope or "(none)", _FLOPS),
        _grouped("FLOPs by line", operations, lambda o: near(o.place, "(none)"), _FLOPS),
    ]


def family(word: str) -> str:
    """Return the colour of a precision: its own, that of all 8-bit formats, or that of no float.

    >>> family("bf16"), family("f8_e4m3"), family("int32")
    ('bf16', 'f8', 'other')
    """
    if word in _FLOATS:
        return word
    return _LOW if word.startswith(_LOW) else OTHER


class _Measure(NamedTuple):
    """The length of a bar, how the number is written, and which precision colours it."""

    value: Callable[[Tally], int]
    words: Callable[[float], str]
    colour: str


_FLOPS = _Measure(lambda tally: tally.flops, amount, "arithmetic")
_BYTES = _Measure(lambda tally: tally.bytes, storage, "stored")
_OPERATIONS = _Measure(lambda tally: tally.operations, amount, "arithmetic")


def _shares(operations: Sequence[Operation]) -> Chart:
    bars = []
    for name, measure in (("FLOPs", _FLOPS), ("bytes", _BYTES), ("operations", _OPERATIONS)):
        sums = _by_precision(operations, measure)
        whole = sum(sums.values())
        bars.append(Bar(name, _parts(sums, whole, measure), measure.words(whole)))
    return Chart("share of each precision", tuple(bars))


def _grouped(
    title: str,
    operations: Sequence[Operation],
    key: Callable[[Operation], str],
    measure: _Measure,
) -> Chart:
    groups = grouped(operations, key)
    sums = {name: _by_precision(group, measure) for name, group in groups.items()}
    wholes = {name: sum(parts.values()) for name, parts in sums.items()}
    most = sorted((n for n in wholes if wholes[n]), key=lambda n: -wholes[n])[:_MOST]
    bars = [
        Bar(name, _parts(sums[name], wholes[most[0]], measure), measure.words(wholes[name]))
        for name in most
    ]
    return Chart(title, tuple(bars))


def _by_precision(operations: Sequence[Operation], measure: _Measure) -> dict[str, int]:
    sums: dict[str, int] = defaultdict(int)
    for operation in operations:
        sums[family(getattr(operation, measure.colour))] += measure.value(operation.tally)
    order = [*reversed(_FLOATS), _LOW, OTHER]
    return {name: sums[name] for name in sorted(sums, key=order.index)}


def _parts(sums: Mapping[str, int], whole: int, measure: _Measure) -> tuple[Part, ...]:
    own = sum(sums.values())
    return tuple(
        Part(name, n / whole, f"{name}: {measure.words(n)}, {share(n, own)}")
        for name, n in sums.items()
        if n
    )
