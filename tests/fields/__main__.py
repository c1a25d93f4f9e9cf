"""The command line of the fields.

    python -m tests.fields                      every program, in both formats and orders
    python -m tests.fields --only flow          those with `flow` in field or name
    python -m tests.fields --neighbours 16      median errors over arguments a little off
    python -m tests.fields --results FILE       go on where an earlier run has stopped

Prints what is wrong by cause; ends unsuccessfully if the list of known failures says otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import multiprocessing
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import track

import tests.flags  # noqa: F401 - sets the XLA flags, before JAX starts


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fields",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="TEXT in field or name")
    parser.add_argument("--neighbours", type=int, default=1, metavar="N", help="arguments of each")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--results", type=pathlib.Path, metavar="FILE", help="kept between runs")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    programs = importlib.import_module("tests.fields.measure").FIELD_PROGRAMS
    return [name for name, program in programs.items() if text in str(program)]


def _run(names: Sequence[str], workers: int, neighbours: int) -> Iterator[list[dict[str, Any]]]:
    """Run programs in processes that are renewed now and then, as JAX keeps what it compiles."""
    # No executor: with `max_tasks_per_child` one of CPython 3.11 stops for ever (gh-115634).
    rows = importlib.import_module("tests.fields.measure").rows
    if neighbours > 1:
        among = importlib.import_module("tests.fields.neighbours").rows
        rows = functools.partial(among, count=neighbours)
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=20) as pool:
        for found in pool.imap_unordered(rows, names):
            yield [dataclasses.asdict(row) for row in found]


def main() -> int:
    """Run what the command line asks for; 1 if the list of known failures is wrong."""
    options, console = _arguments(), Console(soft_wrap=True)
    report = importlib.import_module("tests.fields.report")
    kept = options.results
    lines = kept.read_text().splitlines() if kept and kept.exists() else []
    names = _names(options.only)
    rows = [row for row in map(json.loads, lines) if row["name"] in names]
    rest = [name for name in names if name not in {row["name"] for row in rows}]
    shown = _run(rest, options.workers, options.neighbours)
    for new in track(shown, "running", len(rest), console=Console(stderr=True)):
        rows += new
        if kept:
            with kept.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in new)
    rows = [report.Row(**row) for row in rows]
    console.print(report.table(rows))
    surprises = report.surprises(rows, are_medians=options.neighbours > 1)
    for line in surprises:
        console.print(line, markup=False, highlight=False)
    return int(bool(surprises))


if __name__ == "__main__":
    sys.exit(main())
