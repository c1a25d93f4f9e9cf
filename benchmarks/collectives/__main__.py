"""Bytes between devices of one train step, compiled for four or eight absent TPUs or GPUs.

python -m benchmarks.deviceless --install tpu     the compiler, once; gpu for --target h200
python -m benchmarks.collectives                  the table, and JSON under out/
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxamp.compiled.deviceless import ENVIRONMENTS
from jaxamp.compiled.targets import TARGETS

_MIB = 2**20


def main(argv: Sequence[str] | None = None) -> None:
    """Compile, count, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collectives",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", choices=("v5e", "h200"), default="v5e")
    parser.add_argument("--only", default="", help="words of the program's name")
    parser.add_argument("--unrolled", action="store_true", help="layers written out, not scanned")
    parser.add_argument("--dump", type=Path, help="folder for the compiled programs")
    parser.add_argument("--json", type=Path, default=Path("out/collectives.json"))
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "rows"
        found.touch()
        dump = ("--dump", str(options.dump)) if options.dump else ()
        where = ("--target", options.target, "--json", str(found), "--only", options.only)
        layers = ("--unrolled",) if options.unrolled else ()
        environment = ENVIRONMENTS[TARGETS[options.target].environment]
        environment.run("-m", "benchmarks.collectives.inside", *where, *layers, *dump)
        rows = [json.loads(line) for line in found.read_text().splitlines()]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(rows, indent=1) + "\n")
    Console(width=120).print(table(rows))


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line for each program: the bytes of each collective, by dtype."""
    kinds = sorted({(op, dtype) for row in rows for op, dtype, _ in row["bytes"]})
    result = Table("program", "precision", *(f"{op} {dtype}" for op, dtype in kinds), "all")
    for row in rows:
        counts = {(op, dtype): count for op, dtype, count in row["bytes"]}
        cells = [f"{counts.get(kind, 0) / _MIB:.1f}" for kind in [*kinds]]
        total = f"{sum(counts.values()) / _MIB:.1f}"
        result.add_row(f"{row['style']}, {row['strategy']}", row["variant"], *cells, total)
    result.title = "MiB in collectives, one train step"
    return result


if __name__ == "__main__":
    main()
