"""Show the difference of two policies at a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxamp.display.numbers import amount, near, storage
from jaxamp.inspect.diff import Change, Difference, describe
from jaxamp.inspect.operation import total

_MANY = 40


def show_difference(difference: Difference) -> Group:
    """Show totals side by side, then the lines that change."""
    return Group(*_parts(difference))


def _parts(difference: Difference) -> Iterator[Any]:
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
    for heading in ("what", "change", "why before", "why after"):
        table.add_column(heading, overflow="fold")
    table.add_column("FLOPs", justify="right")
    for place, words, changes in lines[:_MANY]:
        flops = amount(total(c.either for c in changes).flops)
        where = f"{near(place.file)}:{place.line}" if place.file else ""
        table.add_row(where, describe(changes), words, *_reasons(changes), flops)
    yield table


def _totals(difference: Difference) -> Table:
    table = Table()
    table.add_column("")
    for side in (difference.before, difference.after):
        table.add_column(side.policy, justify="right")
    sides = difference.before, difference.after
    table.add_row("bytes before fusion", *(storage(side.total.bytes) for side in sides))
    table.add_row("casts inserted", *(str(side.total.inserted) for side in sides))
    for word in sorted({word for side in sides for word in side.dots()}):
        table.add_row(f"dots in {word}", *(str(side.dots().get(word, 0)) for side in sides))
    return table


def _reasons(changes: list[Change]) -> tuple[str, str]:
    """Return the reasons of the most expensive operation on either side."""
    largest = max(changes, key=lambda c: c.either.tally.flops)
    before, after = largest.before, largest.after
    return before.reason if before else "", after.reason if after else ""
