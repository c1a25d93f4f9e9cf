"""Render a report as one self-contained HTML page."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from jaxamp.display.charts import charts, family
from jaxamp.display.numbers import amount, near_file, share, storage
from jaxamp.inspect.operation import Place, Row, common_scope, grouped, numberless, rows_of
from jaxamp.inspect.report import Report

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
    found = f"{total.shared} shared, {total.cancelled} cancelled"
    return [
        (share(low, total.flops), "of FLOPs in 16 bits or fewer", amount(total.flops, "FLOP")),
        (storage(total.bytes), "moved, before fusion", f"{storage(total.saved)} saved"),
        (str(total.operations), "operations", f"{len(rows_of(report.operations))} rows below"),
        (str(sum(report.dots().values())), "dots and convolutions", dots),
        (str(total.inserted), "casts inserted", found),
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
        "casts": tally.inserted,
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
