"""The tables of hostile cases and of islands: for the terminal and as a page of the docs."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from tests.numerics.distances import NEIGHBOUR, QUANTITIES, island_distance
from tests.numerics.hostile import CASES
from tests.numerics.islands import ISLANDS
from tests.numerics.measure import ALLOWED, Measured
from tests.numerics.ulps import LOW

COMMAND = "python -m tests.numerics"
BROKEN = "✗"

_HOSTILE_NOTE = f"""\
Each case is a float32 program that careless low precision ruins. The values are those of one
element, the one that the literal table (the preset without guards) gets most wrong. Errors are the
largest of all elements, in ulps of the low format relative to the largest float32 element: of
rounding the operands of the products and nothing else / of the literal table / of jaxamp. jaxamp
may lose {ALLOWED:g} ulps more than rounding alone; ✗ marks where it loses more."""

_ISLAND_NOTE = """\
Each reduction stands between two products. How many low-precision numbers the results are off, at
most, from the same program with the reduction in float32 from its low-precision input and rounded
once: the value, the gradients of `grad(amp(f))`, the gradients of `amp(grad(f))`. 1 is allowed;
✗ marks where it is more."""


@dataclasses.dataclass(frozen=True)
class Sheet:
    """A table as text.

    Attributes:
        title: a line.
        note: how to read it.
        header: a word for each column.
        rows: a word for each cell.
    """

    title: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def show(self, console: Console) -> None:
        """Prints it."""
        table = Table(title=self.title, caption=self.note, caption_justify="left")
        for i, word in enumerate(self.header):
            table.add_column(word, justify="left" if i < 1 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    @property
    def broken(self) -> bool:
        """Whether a promise is."""
        return any(BROKEN in cell for row in self.rows for cell in row)

    def markdown(self) -> str:
        """The table with its title and note."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        table = "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in r) + " |" for r in lines)
        return f"## {self.title}\n\n{self.note}\n\n{table}\n"


def hostile_sheet(track: Callable[[Iterable[str]], Iterable[str]]) -> Sheet:
    """The hostile cases in both formats; `track` may show how far it is."""
    rows = [_hostile_row([Measured(CASES[n], low) for low in LOW]) for n in track(CASES)]
    header = ["case", "at stake", "f32"]
    for low in LOW:
        header += [f"{low} literal", f"{low} jaxamp", f"{low} ulps"]
    return Sheet(f"{len(rows)} hostile cases", _HOSTILE_NOTE, header, rows)


def island_sheet(track: Callable[[Iterable[str]], Iterable[str]]) -> Sheet:
    """The islands in both formats, and the largest distances."""
    kinds = [(low, quantity) for low in LOW for quantity in QUANTITIES]
    rows, largest = [], [0.0] * len(kinds)
    for name in track(ISLANDS):
        off = [island_distance(name, *kind) for kind in kinds]
        rows.append([name, *map(_distance, off)])
        largest = list(map(max, largest, off))
    rows.append(["largest", *map(_distance, largest)])
    header = ["island", *(" ".join(kind) for kind in kinds)]
    return Sheet(f"{len(rows) - 1} reduction islands", _ISLAND_NOTE, header, rows)


def page(sheets: Iterable[Sheet]) -> str:
    """The sheets as a page of the docs."""
    device = jax.devices()[0]
    made = (
        f"Made by `{COMMAND}` on {datetime.date.today():%Y-%m-%d} with JAX {jax.__version__} "
        f"on {device.platform} ({device.device_kind})."
    )
    return "\n".join(["# Hostile numerics\n", made + "\n", *(s.markdown() for s in sheets)])


def _hostile_row(measured: Sequence[Measured]) -> list[str]:
    case = measured[0].case
    i = _most_wrong(measured)
    row = [str(case), case.stake, _number(measured[0].elements()[i])]
    for m in measured:
        errors = " / ".join(_error(m.error(way)) for way in ("rounding", "literal", "amp"))
        row += [_number(m.elements(way)[i]) for way in ("literal", "amp")]
        row.append(errors if m.holds else f"{errors} {BROKEN}")
    return row


def _most_wrong(measured: Sequence[Measured]) -> int:
    """The element that the literal table gets most wrong, in the format where that is worst."""
    offs = [np.abs(m.elements("literal") - m.elements()) for m in measured]
    return int(np.argmax(np.nan_to_num(np.maximum(*offs), nan=np.inf)))


def _number(x: float) -> str:
    return f"{x:.4g}"


def _error(ulps: float) -> str:
    return f"{ulps:.2g}" if ulps < 100 else f"{ulps:.0f}" if ulps < 1e4 else f"{ulps:.0e}"


def _distance(off: float) -> str:
    return f"{off:g}" if off <= NEIGHBOUR else f"{off:g} {BROKEN}"
