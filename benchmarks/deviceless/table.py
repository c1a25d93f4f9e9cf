"""Show the figures: what each program moves and holds, and the ratio to the hand-written ones."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from benchmarks.deviceless.models.fused import FUSED
from benchmarks.deviceless.models.model import HAND

_BYTES = {"bytes": "bytes moved", "accessed": "accessed (XLA)", "temporary": "temporary"}


def table(target: str, rows: list[dict[str, Any]]) -> Table:
    """One section for each model, one row for each program."""
    title = f"value_and_grad compiled for {target}; × is the ratio to hand-written"
    if any(row["variant"] == FUSED for row in rows):
        title += ", and to that with fused attention"
    shown = Table(title=title)
    shown.add_column("program")
    columns = [key for key in _BYTES if any(row[key] is not None for row in rows)]
    for key in columns:
        shown.add_column(_BYTES[key], justify="right")
    shown.add_column("kernels", justify="right")
    shown.add_column("dots")
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        hands = [row for name in (HAND, FUSED) for row in of_model if row["variant"] == name]
        shown.add_section()
        shown.add_row(f"[bold]{model}")
        for row in of_model:
            cells = [_cell(row, hands, key, _size) for key in columns]
            shown.add_row(row["variant"], *cells, _cell(row, hands, "kernels", str), _dots(row))
    return shown


def _cell(row: dict[str, Any], hands: list[dict[str, Any]], key: str, write: Any) -> str:
    ratios = [f"{row[key] / hand[key]:.3f}×" for hand in hands if hand[key]]
    return "  ".join([write(row[key]), *ratios])


def _size(number: float) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def _dots(row: dict[str, Any]) -> str:
    counted = sorted(row["dots"].items(), key=lambda item: -item[1])
    return "\n".join(f"{count} {dtypes}" for dtypes, count in counted)
