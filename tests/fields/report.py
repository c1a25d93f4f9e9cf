"""The table of the fields: how many runs are wrong, by cause."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from rich.table import Table

from tests.fields.known import CAUSES, DRAWS, KNOWN

UNLISTED = "not listed"


@dataclasses.dataclass(frozen=True)
class Row:
    """What is kept of a run.

    Attributes:
        name: of the program.
        low: the format.
        order: of `amp` and the derivative.
        wrong: whether it is beyond what is allowed.
        place: of the worst array.
        error: of that array, relative to its largest element.
        rounding: the error there of rounding operands and results of products alone.
        arrays: how many arrays there are.
        undecided: how many of them rounding the products alone ruins.
    """

    name: str
    low: str
    order: str
    wrong: bool
    place: str
    error: float
    rounding: float
    arrays: int
    undecided: int

    @property
    def run(self) -> str:
        """The name by which the list of known failures calls it."""
        return f"{self.name} {self.low} {self.order}"


def cause(row: Row) -> str | None:
    """Find the cause under which a run is listed."""
    return next((c for c, runs in KNOWN.items() if row.run in runs), None)


def surprises(rows: Iterable[Row], *, are_medians: bool = False) -> list[str]:
    """List runs that fail and are not listed, and those that are listed and pass.

    Args:
        rows: the runs.
        are_medians: whether errors are medians over neighbouring arguments: then what is listed as
            one draw has to pass.
    """
    found = []
    for row in rows:
        listed = cause(row)
        if are_medians and listed == DRAWS:
            listed = None
        if row.wrong and listed is None:
            found.append(
                f"{row.run}: {row.place} is off by {row.error:.2g}, rounding {row.rounding:.2g}"
            )
        if listed and not row.wrong:
            found.append(f"{row.run} is listed ({listed}) and passes: take it off the list")
    return found


def table(rows: Sequence[Row]) -> Table:
    """Draw the wrong runs by cause and way of running."""
    wrong = [row for row in rows if row.wrong]
    ways = sorted({(row.low, row.order) for row in rows})
    drawn = Table(
        title=f"{len(wrong)} of {len(rows)} runs are wrong, "
        f"{len({r.name for r in wrong})} of {len({r.name for r in rows})} programs",
        caption=f"{sum(r.undecided for r in rows)} of {sum(r.arrays for r in rows)} arrays are not "
        "compared, as rounding the products alone ruins them",
    )
    for word in ("cause", "programs", *(" ".join(way) for way in ways)):
        drawn.add_column(word, justify="left" if word == "cause" else "right")
    groups = collections.defaultdict(list)
    for row in wrong:
        groups[cause(row) or UNLISTED].append(row)
    for name in sorted(groups, key=lambda name: -len(groups[name])):
        counts = collections.Counter((row.low, row.order) for row in groups[name])
        programs = len({row.name for row in groups[name]})
        drawn.add_row(
            CAUSES.get(name, name), str(programs), *(str(counts[way] or "") for way in ways)
        )
    return drawn
