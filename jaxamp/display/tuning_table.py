"""Show the result of ``tune`` at a terminal."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from jaxamp.errors import counted
from jaxamp.tools.tune import Tuning


def show_tuning(tuning: Tuning) -> Group:
    """Show the verdict, and below it every group, the most sensitive first."""
    table = Table(title="groups, the most sensitive first", title_justify="left")
    for heading in ("scope", "function", "kind", "precision"):
        table.add_column(heading, overflow="fold")
    for heading in ("predicted error", "time saved"):
        table.add_column(heading, justify="right")
    for v in tuning.verdicts:
        low = "low" if v.low else "f32"
        saved = f"{100 * v.saved / tuning.cost_f32:.2f} %"
        table.add_row(
            v.group.scope, v.group.function, v.group.kind, low, f"{v.predicted:.1e}", saved
        )
    return Group(_sentence(tuning), table)


def _sentence(tuning: Tuning) -> str:
    time, low = tuning.cost / tuning.cost_f32, tuning.cost_low / tuning.cost_f32
    return (
        f"error {tuning.error:.2e} of {tuning.budget:.2e} allowed, modelled time {time:.3f} of "
        f"float32's (all low: {low:.3f}), {counted(len(tuning.policy.rules), 'rule')}, "
        f"{counted(tuning.runs, 'run')}"
    )
