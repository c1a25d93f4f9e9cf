"""Show all tables of a report at a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from jaxamp.display.numbers import amount, share, storage
from jaxamp.display.summary import COLORS
from jaxamp.display.tables import columns
from jaxamp.inspect.operation import Row, rows_of
from jaxamp.inspect.report import Report

_FEW = 12  # scopes whose memory is listed
_MANY = 40  # dots that are listed; the page and the JSON have all


def precision_text(word: str) -> Text:
    """Write a precision in its colour."""
    return Text(word, style=COLORS.get(word.strip(), "dim"))


def show_report(report: Report) -> Iterator[Any]:
    """Show totals, casts, guards and every dot."""
    total = report.total
    yield Text.assemble(
        (report.program or "program", "bold"), f" under {report.policy}: {report.headline}"
    )
    yield Text.assemble(
        f"{total.operations} operations, {amount(total.flops, 'FLOP')}, ",
        f"{storage(total.bytes)} before fusion",
        f" ({storage(total.saved)} less than as written)" if total.saved else "",
    )  # fmt: skip
    yield _shares(report)
    yield Text(
        f"casts: {total.inserted} inserted, {total.shared} shared with an earlier reader, "
        f"{total.cancelled} cancelled"
    )
    if report.guards:
        named = ", ".join(f"{name} {n}" for name, n in report.guards.items())
        yield Text(f"guards: {named}")
    yield from (Text(note, style="yellow") for note in report.notes)
    if report.residuals:
        yield from _residuals(report)
    if report.contractions:
        yield _dots(report)


def _shares(report: Report) -> Table:
    total = report.total
    table = Table(title="by kind and precision of arithmetic", title_justify="left")
    columns(table, ("kind", "precision"), ("operations", "FLOPs", "bytes", "bytes saved"))
    for (kind, word), tally in report.by("kind", "arithmetic").items():
        if tally.operations:
            table.add_row(
                kind,
                precision_text(word),
                f"{tally.operations}  {share(tally.operations, total.operations)}",
                share(tally.flops, total.flops),
                share(tally.bytes, total.bytes),
                storage(tally.saved) if tally.saved > 0 else "",
            )
    return table


def _residuals(report: Report) -> Iterator[Any]:
    residuals = report.residual_bytes()
    rest = f", the first {_FEW} of {len(residuals)}" if len(residuals) > _FEW else ""
    yield Text(
        f"residuals, in memory for the backward pass: {storage(sum(residuals.values()))}{rest}",
        style="italic",
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("scope", overflow="fold")
    table.add_column("dtype", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for (scope, word), size in list(residuals.items())[:_FEW]:
        table.add_row(scope or "(none)", precision_text(word), storage(size))
    yield table


def _dots(report: Report) -> Table:
    rows = rows_of(o for o in report.contractions if o.runs)
    found = sorted(rows, key=lambda row: -row.tally.flops)
    rest = f", the first {_MANY} of {len(found)}" if len(found) > _MANY else ""
    title = f"dots and convolutions, largest first{rest}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns(table, ("operands", "result"))
    table.add_column("inside", no_wrap=True)
    columns(table, (), ("", "FLOPs"), no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("line", no_wrap=True)
    table.add_column("scope", overflow="fold")
    for row in found[:_MANY]:
        table.add_row(*_dot(row))
    return table


def _dot(row: Row) -> list[Any]:
    operation = row.operation
    times = row.count * operation.runs
    operands = Text(" × ".join(operation.operands[:2]), style=COLORS.get(operation.arithmetic, ""))
    return [
        operands,
        operation.results[0],
        operation.accumulation,
        f"× {times}" if times != 1 else "",
        amount(row.tally.flops),
        "bwd" if operation.backward else "fwd",
        operation.place.short,
        row.scope,
    ]
