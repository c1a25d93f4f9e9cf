"""Show what consists of tables at a terminal: full reports, differences, estimates and the like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from jaxamp.display.lines import amount, near, share, storage
from jaxamp.display.summary import COLORS
from jaxamp.errors import counted
from jaxamp.inspect.diff import Change, Difference
from jaxamp.inspect.operation import Row, few, rows_of, total
from jaxamp.inspect.report import Report
from jaxamp.numerics.probe_report import Measured, ProbeReport
from jaxamp.tools.estimate import Compiled, Estimate
from jaxamp.tools.tune import Tuning

_MANY = 40  # rows that are listed; the page and the JSON have all
_MODEL = (
    "The model: each kernel takes the longer of moving its bytes and of multiplying, both at the "
    "share of the published speed that kernels reach, and some microseconds to start. Nothing "
    "ran; trust ratios rather than seconds."
)


def columns(
    table: Table, words: Sequence[str] = (), numbers: Sequence[str] = (), *, no_wrap: bool = False
) -> Table:
    """Add columns of words, which may be folded, and of numbers, with `no_wrap` on one line."""
    for heading in words:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=no_wrap)
    return table


def show_difference(difference: Difference) -> Iterator[Any]:
    """Show totals side by side, then the lines that change."""
    before, after = difference.before, difference.after
    yield Text.assemble((after.program, "bold"), f": {before.policy} → {after.policy}")
    if not difference.changes:
        yield Text("no operation runs otherwise")
        return
    yield _totals(difference)
    lines = difference.lines()
    rest = f", the first {_MANY} of {len(lines)}" if len(lines) > _MANY else ""
    table = Table(title=f"what changes, most FLOPs first{rest}", title_justify="left")
    table.add_column("line", no_wrap=True)
    columns(table, ("what", "change", "why before", "why after"), ("FLOPs",))
    for place, words, changes in lines[:_MANY]:
        operations = [change.either for change in changes]
        what = few(Counter(operation.primitive for operation in operations))
        flops = amount(total(operations).flops)
        table.add_row(near(place), what, words, *_reasons(changes), flops)
    yield table


def _totals(difference: Difference) -> Table:
    sides = difference.before, difference.after
    table = columns(Table(), ("",), [side.policy for side in sides])
    table.add_row("bytes before fusion", *(storage(side.total.bytes) for side in sides))
    table.add_row("casts inserted", *(str(side.casts.inserted) for side in sides))
    for word in sorted({word for side in sides for word in side.dots()}):
        table.add_row(f"dots in {word}", *(str(side.dots().get(word, 0)) for side in sides))
    return table


def _reasons(changes: list[Change]) -> tuple[str, str]:
    """Return the reasons of the most expensive operation on either side."""
    largest = max(changes, key=lambda c: c.either.tally.flops)
    before, after = largest.before, largest.after
    return before.reason if before else "", after.reason if after else ""


def show_estimate(estimate: Estimate) -> Iterator[Any]:
    """Show a column for each policy: compiled facts above, the model of time below."""
    yield Text.assemble((estimate.program, "bold"), f" compiled for {estimate.title}")
    rows = estimate.compiled
    policies = [row.policy for row in rows]
    facts = columns(Table(title="compiled: facts", title_justify="left"), ("",), policies)
    _add(facts, rows, "bytes moved", lambda r: r.bytes, storage)
    _add(facts, rows, "temporary memory", lambda r: r.temporary, storage)
    _add(facts, rows, "kernels", lambda r: r.kernels, str)
    _add(facts, rows, "FLOPs of dots", lambda r: r.flops, amount)
    for word in sorted({word for row in rows for word in {**row.dots, **row.planned}}):
        facts.add_row(f"dots in {word}", *(_dots(row, word) for row in rows))
    if not any(row.fp8 for row in rows):
        facts.add_row("dots in FP8", *("0" for _ in rows))
    yield facts
    model = columns(Table(title="roofline: a model", title_justify="left"), ("",), policies)
    times = [row.time for row in rows]
    _add(model, rows, "time", lambda r: r.time.seconds, _seconds)
    model.add_row("limited by memory", *(share(t.by_memory, t.seconds) for t in times))
    if any(t.by_starts for t in times):
        model.add_row("starting kernels", *(share(t.by_starts, t.seconds) for t in times))
    yield model
    yield Text(_MODEL, style="italic")
    if loops := max(row.unknown_loops for row in rows):
        yield Text(
            f"{loops} loops count once, as their numbers of trips are not known", style="yellow"
        )


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


def show_probe(report: ProbeReport) -> Iterator[Any]:
    """Show the operations of the lowest SQNR, below infinities in results or arguments."""
    worst = report.worst()
    yield from [str(report.first)] if report.first else report.too_large
    title = f"probe under {report.policy}: {len(report.operations)} operations"
    caption = f"the {len(worst)} of the lowest SQNR" if worst else "none has an error"
    numbers = "max error", "rms", "SQNR dB", "over", "under", "subn.", "headroom"
    words = "operation", "stored", "scope", "line"
    table = columns(Table(title=title, caption=caption), words, numbers, no_wrap=True)
    for op in worst:
        table.add_row(*_cells(op))
    yield table


def _cells(op: Measured) -> tuple[str, ...]:
    name = f"{op.primitive} (backward)" if op.backward else op.primitive
    counts = op.overflow, op.underflow, op.subnormal
    shares = (f"{count:.1%}" if count else "-" for count in counts)
    errors = f"{op.max_error:.2e}", f"{op.rms_error:.2e}", f"{op.sqnr:.1f}"
    return (name, op.stored, op.scope, op.place.short, *errors, *shares, f"{op.headroom:.3g}")


def show_tuning(tuning: Tuning) -> Iterator[Any]:
    """Show the verdict, and below it every group, the most sensitive first."""
    time, low = tuning.cost / tuning.cost_f32, tuning.cost_low / tuning.cost_f32
    yield (
        f"error {tuning.error:.2e} of {tuning.budget:.2e} allowed, modelled time {time:.3f} of "
        f"float32's (all low: {low:.3f}), {counted(len(tuning.policy.rules), 'rule')}, "
        f"{counted(tuning.runs, 'run')}"
    )
    words, numbers = ("scope", "function", "kind", "precision"), ("predicted error", "time saved")
    title = "groups, the most sensitive first"
    table = columns(Table(title=title, title_justify="left"), words, numbers)
    for v in tuning.verdicts:
        saved = f"{100 * v.saved / tuning.cost_f32:.2f} %"
        group = v.group.scope, v.group.function, v.group.kind
        table.add_row(*group, "low" if v.low else "f32", f"{v.predicted:.1e}", saved)
    yield table


_FEW = 12  # scopes whose memory is listed


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
    inserted, shared, cancelled = report.casts
    yield Text(
        f"casts: {inserted} inserted, {shared} shared with an earlier reader, {cancelled} cancelled"
    )
    if report.guards:
        named = ", ".join(f"{name} {n}" for name, n in report.guards.items())
        yield Text(f"guards: {named}")
    yield from (Text(note, style="yellow") for note in report.notes)
    if report.residuals:
        yield from _residuals(report)
    if report.contractions:
        yield _contractions(report)


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


def _contractions(report: Report) -> Table:
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
