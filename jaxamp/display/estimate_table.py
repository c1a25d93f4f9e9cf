"""Show an estimate at a terminal: compiled facts above, the model of time below."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxamp.display.numbers import amount, share, storage
from jaxamp.tools.estimate import Compiled, Estimate

_MODEL = (
    "The model: each kernel takes the longer of moving its bytes and of its dots, both at the "
    "share of the published speed that kernels reach, and a while to start. Nothing ran; trust "
    "ratios rather than seconds."
)


def show_estimate(estimate: Estimate) -> Group:
    """Show a column for each policy."""
    return Group(*_parts(estimate))


def _parts(estimate: Estimate) -> Iterator[Any]:
    yield Text.assemble((estimate.program, "bold"), f" compiled for {estimate.title}")
    rows = estimate.compiled
    facts = _table("compiled: facts", rows)
    _add(facts, rows, "bytes moved", lambda r: r.bytes, storage)
    _add(facts, rows, "temporary memory", lambda r: r.temporary, storage)
    _add(facts, rows, "kernels", lambda r: r.kernels, str)
    _add(facts, rows, "FLOPs of dots", lambda r: r.flops, amount)
    for word in sorted({word for row in rows for word in {**row.dots, **row.planned}}):
        facts.add_row(f"dots in {word}", *(_dots(row, word) for row in rows))
    if not any(row.fp8 for row in rows):
        facts.add_row("dots in FP8", *("0" for _ in rows))
    yield facts
    model = _table("roofline: a model", rows)
    _add(model, rows, "time", lambda r: r.time.seconds, _seconds)
    model.add_row(
        "limited by memory",
        *(share(row.time.by_memory, row.time.seconds) for row in rows),
    )
    if any(row.time.by_starts for row in rows):
        model.add_row(
            "starting kernels",
            *(share(row.time.by_starts, row.time.seconds) for row in rows),
        )
    yield model
    yield Text(_MODEL, style="italic")
    if loops := max(row.unknown_loops for row in rows):
        yield Text(f"{loops} loops count once: their trips are not known", style="yellow")


def _table(title: str, rows: tuple[Compiled, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for row in rows:
        table.add_column(row.policy, justify="right")
    return table


def _add(
    table: Table,
    rows: tuple[Compiled, ...],
    name: str,
    value: Callable[[Compiled], float],
    words: Callable[[Any], str],
) -> None:
    first, *others = rows
    base = value(first)
    cells = [words(base)]
    for row in others:
        ratio = f"  {value(row) / base:.2f}×" if base else ""
        cells.append(f"{words(value(row))}{ratio}")
    table.add_row(name, *cells)


def _dots(row: Compiled, word: str) -> str:
    made, planned = row.dots.get(word, 0), row.planned.get(word, 0)
    return str(made) if made == planned else f"{made}, planned {planned}"


def _seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
