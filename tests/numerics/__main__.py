"""The command line of the numerics tables.

    python -m tests.numerics                  both tables, and out/numerics.md
    python -m tests.numerics --only softmax   what has `softmax` in its name; writes nothing

Ends unsuccessfully if anything is marked ✗.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys
from collections.abc import Iterable

from rich.console import Console
from rich.progress import track

import tests.flags  # noqa: F401 - sets the XLA flags, before JAX starts

PAGE = pathlib.Path(__file__).parents[2] / "out" / "numerics.md"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.numerics",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="TEXT", help="cases with TEXT in their name")
    return parser.parse_args()


def main() -> int:
    """Measures, prints and writes."""
    options = _arguments()
    report = importlib.import_module("tests.numerics.report")
    console = Console()

    def tracked(names: Iterable[str]) -> Iterable[str]:
        chosen = [name for name in names if (options.only or "") in name]
        return track(chosen, "measuring", console=Console(stderr=True), transient=True)

    sheets = [report.hostile_sheet(tracked), report.island_sheet(tracked)]
    for sheet in sheets:
        sheet.show(console)
    if options.only is None:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(report.page(sheets))
        console.print(f"written to {PAGE}")
    return int(any(sheet.broken for sheet in sheets))


if __name__ == "__main__":
    sys.exit(main())
