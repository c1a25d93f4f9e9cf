"""Show what consists of tables at a terminal: full reports, differences, estimates and the like."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text

from jaxamp.display.lines import amount, near, share, storage
from jaxamp.display.summary import COLORS
from jaxamp.errors import counted
from jaxamp.inspect.diff import Change, Difference
from jaxamp.inspect.operation import Place, Row, few, rows_of, total
from jaxamp.inspect.report import Report
from jaxamp.numerics.probe_report import Measured, ProbeReport
from jaxamp.tools.estimate import Compiled, Estimate
from jaxamp.tools.tune import Tuning

_MANY = 40  # rows that are listed; the page and the JSON have all
_DENSE: Any = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
_MODEL = (
    "The model: each kernel takes the longer of moving its bytes and of multiplying, both at the "
    "share of the published speed that kernels reach, and some microseconds to start. Nothing "
    "ran; trust ratios rather than seconds."
)


def _table(
    title: str,
    words: Sequence[str],
    numbers: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    no_wrap: bool = False,
    **options: Any,
) -> Table:
    """Return a table of words, which may be folded, and of numbers, with `no_wrap` on one line."""
    headings = [Column(word, overflow="fold") for word in words]
    headings += [Column(number, justify="right", no_wrap=no_wrap) for number in numbers]
    table = Table(*headings, title=title or None, title_justify="left", **options)
    for row in rows:
        table.add_row(*row)
    return table


def _first(many: Sized, most: int = _MANY) -> str:
    """Return what a title says where not all rows are listed."""
    return f", the first {most} of {len(many)}" if len(many) > most else ""


def show_difference(difference: Difference) -> Iterator[Any]:
    """Show totals side by side, then the lines that change."""
    before, after = sides = difference.before, difference.after
    yield Text.assemble((after.program, "bold"), f": {before.policy} → {after.policy}")
    if not difference.changes:
        yield Text("no operation runs otherwise")
        return
    totals = [
        ("bytes before fusion", *(storage(side.total.bytes) for side in sides)),
        ("casts inserted", *(str(side.casts) for side in sides)),
    ]
    for word in sorted({word for side in sides for word in side.dots()}):
        totals.append((f"dots in {word}", *(str(side.dots().get(word, 0)) for side in sides)))
    yield _table("", [""], [side.policy for side in sides], totals)
    lines = difference.lines()
    title = f"what changes, most FLOPs first{_first(lines)}"
    words = "line", "what", "change", "why before", "why after"
    yield _table(title, words, ["FLOPs"], itertools.starmap(_changed, lines[:_MANY]))


def _changed(place: Place, words: str, changes: list[Change]) -> tuple[str, ...]:
    """Return the row of a line, with the reasons of its most expensive operation on either side."""
    operations = [change.either for change in changes]
    largest = max(changes, key=lambda c: c.either.tally.flops)
    reasons = (side.reason if side else "" for side in (largest.before, largest.after))
    what = few(Counter(operation.primitive for operation in operations))
    return near(place), what, words, *reasons, amount(total(operations).flops)


def show_estimate(estimate: Estimate) -> Iterator[Any]:
    """Show a column for each policy: compiled facts above, the model of time below."""
    yield Text.assemble((estimate.program, "bold"), f" compiled for {estimate.title}")
    rows = estimate.compiled
    policies = [row.policy for row in rows]
    facts = [
        _compared(rows, "bytes moved", lambda r: r.bytes, storage),
        _compared(rows, "temporary memory", lambda r: r.temporary, storage),
        _compared(rows, "kernels", lambda r: r.kernels, str),
        _compared(rows, "FLOPs of dots", lambda r: r.flops, amount),
    ]
    for word in sorted({word for row in rows for word in {**row.dots, **row.planned}}):
        facts.append([f"dots in {word}", *(_dots(row, word) for row in rows)])
    yield _table("compiled: facts", [""], policies, facts)
    times = [row.time for row in rows]
    model = [
        _compared(rows, "time", lambda r: r.time.seconds, _seconds),
        ["limited by memory", *(share(t.by_memory, t.seconds) for t in times)],
    ]
    if any(t.by_starts for t in times):
        model.append(["starting kernels", *(share(t.by_starts, t.seconds) for t in times)])
    yield _table("roofline: a model", [""], policies, model)
    yield Text(_MODEL, style="italic")
    if loops := max(row.unknown_loops for row in rows):
        yield Text(
            f"{loops} loops count once, as their numbers of trips are not known", style="yellow"
        )


def _compared(
    rows: tuple[Compiled, ...],
    name: str,
    value: Callable[[Compiled], float],
    words: Callable[[Any], str],
) -> list[str]:
    """Return a row with the ratio of each policy to the first."""
    base, *others = map(value, rows)
    ratios = (f"{words(other)}  {other / base:.2f}×" if base else words(other) for other in others)
    return [name, words(base), *ratios]


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
    yield _table(title, words, numbers, map(_cells, worst), no_wrap=True, caption=caption)


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
    rows = []
    for v in tuning.verdicts:
        group = v.group.scope, v.group.function, v.group.kind
        saved = f"{100 * v.saved / tuning.cost_f32:.2f} %"
        rows.append((*group, "low" if v.low else "f32", f"{v.predicted:.1e}", saved))
    yield _table("groups, the most sensitive first", words, numbers, rows)


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
    words, numbers = ("kind", "precision"), ("operations", "FLOPs", "bytes", "bytes saved")
    yield _table("by kind and precision of arithmetic", words, numbers, _shares(report))
    yield Text(f"casts inserted: {report.casts}")
    if report.guards:
        named = ", ".join(f"{name} {n}" for name, n in report.guards.items())
        yield Text(f"guards: {named}")
    yield from (Text(note, style="yellow") for note in report.notes)
    if report.residuals:
        yield from _residuals(report)
    if report.contractions:
        yield _contractions(report)


def _shares(report: Report) -> Iterator[Sequence[Any]]:
    total = report.total
    for (kind, word), tally in report.by("kind", "arithmetic").items():
        if tally.operations:
            yield (
                kind,
                precision_text(word),
                f"{tally.operations}  {share(tally.operations, total.operations)}",
                share(tally.flops, total.flops),
                share(tally.bytes, total.bytes),
                storage(tally.saved) if tally.saved > 0 else "",
            )


def _residuals(report: Report) -> Iterator[Any]:
    residuals = report.residual_bytes()
    whole, rest = storage(sum(residuals.values())), _first(residuals, _FEW)
    yield Text(f"residuals, in memory for the backward pass: {whole}{rest}", style="italic")
    rows = [
        (scope or "(none)", precision_text(word), storage(size))
        for (scope, word), size in list(residuals.items())[:_FEW]
    ]
    yield _table("", ("scope", "dtype"), ["bytes"], rows, no_wrap=True, show_edge=False, **_DENSE)


def _contractions(report: Report) -> Table:
    rows = rows_of(o for o in report.contractions if o.runs)
    found = sorted(rows, key=lambda row: -row.tally.flops)
    title = f"dots and convolutions, largest first{_first(found)}"
    table = _table(title, ("operands", "result"), (), (), **_DENSE)
    for heading in ("inside", "times", "FLOPs", "way", "line"):
        justify = "right" if heading in ("times", "FLOPs") else "left"
        table.add_column(heading, justify=justify, no_wrap=True)
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
