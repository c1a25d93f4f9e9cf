"""Render a report as one self-contained HTML page, with charts: bars that consist of parts."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxamp.display.lines import amount, near, near_file, share, storage
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


Bar = dict[str, Any]
"""One bar: its name, its parts (colour, share of the chart, what it says), and its end."""


def charts(report: Report) -> list[tuple[str, list[Bar]]]:
    """Return the charts, each a title and bars: shares, then what has most, each in colours."""
    every = report.operations
    measures = {"FLOPs": _FLOPS, "bytes": _BYTES, "operations": _OPERATIONS}
    shares = [bar for name, measure in measures.items() for bar in _bars({name: every}, measure)]
    by_guard = grouped(every, lambda o: o.guard or "(none)")
    by_scope = grouped(every, lambda o: o.scope or "(none)")
    by_line = grouped(every, lambda o: near(o.place, "(none)"))
    return [
        ("share of each precision", shares),
        ("operations by guard", _bars(by_guard, _OPERATIONS)),
        ("bytes by kind, before fusion", _bars(grouped(every, lambda o: o.kind), _BYTES)),
        ("FLOPs by scope", _bars(by_scope, _FLOPS)),
        ("FLOPs by line", _bars(by_line, _FLOPS)),
    ]


def family(word: str) -> str:
    """Return the colour of a precision: its own, that of all 8-bit formats, or that of no float.

    >>> family("bf16"), family("f8_e4m3"), family("int32")
    ('bf16', 'f8', 'other')
    """
    if word in _FLOATS:
        return word
    return _EIGHT if word.startswith(_EIGHT) else OTHER


_FLOPS = "flops", "arithmetic", amount
_BYTES = "bytes", "stored", storage
_OPERATIONS = "operations", "arithmetic", amount


def _bars(
    groups: Mapping[str, Sequence[Operation]], measure: tuple[str, str, Callable[[float], str]]
) -> list[Bar]:
    """Return the longest bars, given what of a tally they are, what colours them, how to write it.

    The parts of a bar are its precisions.
    """
    attribute, colour, words = measure
    sums = {}
    for name, group in groups.items():
        parts: dict[str, int] = dict.fromkeys((*reversed(_FLOATS), _EIGHT, OTHER), 0)
        for operation in group:
            parts[family(getattr(operation, colour))] += getattr(operation.tally, attribute)
        sums[name] = parts
    wholes = {name: sum(parts.values()) for name, parts in sums.items()}
    most = sorted((n for n in wholes if wholes[n]), key=lambda n: -wholes[n])[:_MOST]
    return [
        {
            "name": name,
            "parts": [
                (word, n / wholes[most[0]], f"{word}: {words(n)}, {share(n, wholes[name])}")
                for word, n in sums[name].items()
                if n
            ],
            "end": words(wholes[name]),
        }
        for name in most
    ]


PAGES = Path(__file__).parent / "pages"
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
        loader=jinja2.FileSystemLoader(PAGES),
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
    return [
        (share(low, total.flops), "of FLOPs in 16 bits or fewer", amount(total.flops, "FLOP")),
        (storage(total.bytes), "moved, before fusion", f"{storage(total.saved)} saved"),
        (str(total.operations), "operations", f"{len(rows_of(report.operations))} rows below"),
        (str(sum(report.dots().values())), "dots and convolutions", dots),
        (str(report.casts), "casts inserted", "before fusion"),
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
