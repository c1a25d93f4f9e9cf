"""Render a report as one self-contained HTML page, with charts: bars that consist of parts."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxamp.display.lines import amount, near, near_file, share, storage
from jaxamp.inspect.count import Tally
from jaxamp.inspect.operation import (
    Operation,
    Place,
    Row,
    common_scope,
    grouped,
    numberless,
    rows_of,
)
from jaxamp.inspect.report import Report

_MOST = 10  # bars of a chart
_FLOATS = ("f64", "f32", "f16", "bf16")
_EIGHT = "f8"
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
    return _EIGHT if word.startswith(_EIGHT) else OTHER


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
    order = [*reversed(_FLOATS), _EIGHT, OTHER]
    return {name: sums[name] for name in sorted(sums, key=order.index)}


def _parts(sums: Mapping[str, int], whole: int, measure: _Measure) -> tuple[Part, ...]:
    own = sum(sums.values())
    return tuple(
        Part(name, n / whole, f"{name}: {measure.words(n)}, {share(n, own)}")
        for name, n in sums.items()
        if n
    )


_PAGES = Path(__file__).parent / "pages"
_LOW = ("bf16", "f16", "f8")
_FRAME = (
    '<iframe srcdoc="{page}" style="width: 100%; height: 48em; border: 1px solid #8886" '
    'title="jaxamp report"></iframe>'
)


def report_page(report: Report) -> str:
    """Return the page of a report."""
    import jinja2  # text needs none

    rows = rows_of(report.operations)
    modules = {
        key: common_scope([row.scope for row in group])  # what equal layers have in common
        for key, group in grouped(rows, _module_key).items()
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PAGES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        report=report,
        tiles=_tiles(report),
        charts=charts(report),
        notes=report.notes,
        rows=[_row(row, modules[_module_key(row)]) for row in rows],
        residuals=[
            (scope, word, storage(n)) for (scope, word), n in report.residual_bytes().items()
        ],
        family=family,
        residual_bytes=storage(sum(report.residual_bytes().values())),
    )


def in_frame(page: str) -> str:
    """Return the page in an iframe, so that its style and that of a notebook stay separate."""
    return _FRAME.format(page=html.escape(page, quote=True))


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    """Return number, name and detail of each tile."""
    total = report.total
    low = sum(o.tally.flops for o in report.operations if family(o.arithmetic) in _LOW)
    dots = ", ".join(f"{n} in {word}" for word, n in report.dots().items())
    inserted, shared, cancelled = report.casts
    return [
        (share(low, total.flops), "of FLOPs in 16 bits or fewer", amount(total.flops, "FLOP")),
        (storage(total.bytes), "moved, before fusion", f"{storage(total.saved)} saved"),
        (str(total.operations), "operations", f"{len(rows_of(report.operations))} rows below"),
        (str(sum(report.dots().values())), "dots and convolutions", dots),
        (str(inserted), "casts inserted", f"{shared} shared, {cancelled} cancelled"),
    ]


def _module_key(row: Row) -> tuple[str, Place]:
    return numberless(row.scope), row.operation.place


def _row(row: Row, module: str) -> dict[str, Any]:
    """Return the row of operations that are alike; numbers stay numbers, to be sorted."""
    operation, tally, place = row.operation, row.tally, row.operation.place
    return {
        "count": row.count,
        "primitive": operation.primitive,
        "kind": operation.kind,
        "arithmetic": operation.arithmetic,
        "family": family(operation.arithmetic),
        "stored": operation.stored,
        "inside": operation.accumulation,
        "types": f"{', '.join(operation.operands)} → {', '.join(operation.results)}",
        "flops": tally.flops,
        "bytes": tally.bytes,
        "saved": tally.saved,
        "runs": operation.runs,
        "way": "bwd" if operation.backward else "fwd",
        "scope": row.scope,
        "module": module,
        "file": near_file(place.file),
        "line": place.line,
        "text": place.text,
        "reason": operation.reason,
        "guard": operation.guard,
    }
