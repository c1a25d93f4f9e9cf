"""Compare jaxamp with hand-written bfloat16 on chips that are not there.

    python -m benchmarks.deviceless --install gpu              the compiler for NVIDIA, once
    python -m benchmarks.deviceless --install tpu              the compiler for TPU, once
    python -m benchmarks.deviceless --target h200 --model all  the table, and JSON under out/
    python -m benchmarks.deviceless --target h200 --model resnet50 --dump out/dump
    python -m benchmarks.deviceless --target h200 --model decoder experts   not among "all"
    python -m benchmarks.deviceless --accuracy                 errors of the gradients, on the CPU

The vendors' compilers run on any machine; only running needs the chip. What they emit is
deterministic: the bytes that kernels move, the temporary memory, the number of kernels. What is not
seen here: time, and which algorithm a library would choose after trying several.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.deviceless.models import EVERY, MODELS, PACKAGES
from benchmarks.deviceless.table import table
from jaxamp.compiled.deviceless import ENVIRONMENTS
from jaxamp.compiled.targets import TARGETS
from jaxamp.errors import JaxAmpError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.deviceless",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--install", choices=[*ENVIRONMENTS, "all"])
    parser.add_argument("--target", choices=TARGETS)
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--model", nargs="+", default=["all"], choices=["all", *EVERY])
    parser.add_argument("--variant", nargs="*", default=[], help="as the table names them")
    parser.add_argument("--json", type=Path, help="where the figures go (default: out/)")
    parser.add_argument("--dump", type=Path, help="folder for programs, top kernels and buffers")
    options = parser.parse_args(argv)
    if not (options.install or options.target or options.accuracy):
        parser.print_help()
        return 2
    if options.install:
        for name in ENVIRONMENTS if options.install == "all" else [options.install]:
            ENVIRONMENTS[name].install()
    models = [*MODELS, *PACKAGES] if "all" in options.model else options.model
    if options.target:
        path = options.json or Path("out") / f"deviceless-{options.target}.json"
        compare(options.target, models, options.variant, path, options.dump)
    if options.accuracy:
        from benchmarks.deviceless import accuracy  # sets flags that the compilers must not see

        for rows in accuracy.report(models):
            save(rows, options.json or Path("out") / "deviceless-accuracy.json")
    return 0


def save(rows: list[dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")


def compare(
    target: str, models: list[str], variants: list[str], path: Path, dump: Path | None
) -> None:
    """Compile, write the figures to ``path`` and print them."""
    environment = ENVIRONMENTS[TARGETS[target].environment]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "rows"
        found.touch()
        try:
            environment.run(
                *("-m", "benchmarks.deviceless.inside"),
                *("--target", target, "--json", str(found)),
                *("--models", *models, "--variants", *variants),
                *(("--dump", str(dump)) if dump else ()),
            )
        finally:  # what was measured before a failure is not lost
            rows = [json.loads(line) for line in found.read_text().splitlines()]
            save(rows, path)
            Console().print(table(target, rows))


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except JaxAmpError as error:
        raise SystemExit(str(error)) from None
