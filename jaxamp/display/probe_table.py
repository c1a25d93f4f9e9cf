"""Show the measurements of a probe at a terminal."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from jaxamp.numerics.probe_report import Measured, ProbeReport


def show_probe(report: ProbeReport) -> Group:
    """Show the operations of the lowest SQNR, below the first infinity or NaN."""
    worst = report.worst()
    title = f"probe under {report.policy}: {len(report.operations)} operations"
    caption = f"the {len(worst)} of the lowest SQNR" if worst else "none has an error"
    table = Table(title=title, caption=caption)
    for name in ("operation", "stored", "scope", "line"):
        table.add_column(name, overflow="fold")
    for name in ("max error", "rms", "SQNR dB", "over", "under", "subn.", "headroom"):
        table.add_column(name, justify="right", no_wrap=True)
    for op in worst:
        table.add_row(*_cells(op))
    return Group(*([str(report.first)] if report.first else []), table)


def _cells(op: Measured) -> tuple[str, ...]:
    file = op.place.file.rpartition("/")[2]
    where = f"{file}:{op.place.line}" if file else ""
    name = f"{op.primitive} (backward)" if op.backward else op.primitive
    shares = (f"{share:.1%}" if share else "-" for share in (op.overflow, op.underflow))
    subnormal = f"{op.subnormal:.1%}" if op.subnormal else "-"
    errors = f"{op.max_error:.2e}", f"{op.rms_error:.2e}", f"{op.sqnr:.1f}"
    return (name, op.stored, op.scope, where, *errors, *shares, subnormal, f"{op.headroom:.3g}")
