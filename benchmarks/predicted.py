"""Step times by the model of `estimate` beside those that `benchmarks.gpu_train` timed.

    python -m benchmarks.predicted               compile what is timed in docs/gpu_train.json
    python -m benchmarks.predicted --write       put the table into docs/lab-notebook.md

Each timed step is compiled for the H200 that it ran on, as `jaxamp.estimate` does, and timed by
`jaxamp.compiled.roofline`; figures go to docs/gpu_predicted.json, and what that file holds is not
compiled again. The three numbers of the model were chosen on four rows of 23 November 2026, which
the file no longer has: all that it has says what they are worth.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import jax

from benchmarks.deviceless.models import fused
from benchmarks.gpu_models import MODELS
from benchmarks.gpu_train import WAYS, Row, items, make_step
from jaxamp.compiled import traffic
from jaxamp.compiled.deviceless import compile_all, exported
from jaxamp.compiled.roofline import roofline
from jaxamp.compiled.targets import TARGETS
from jaxamp.errors import JaxAmpError

CHIP = TARGETS["h200"]
TIMED, PREDICTED = Path("docs/gpu_train.json"), Path("docs/gpu_predicted.json")
PAGE = Path("docs/lab-notebook.md")
BEGIN, END = "<!-- times by the model -->", "<!-- end of times by the model -->"
WORST = 0.25
"""An error that is larger is to be explained."""

EXPLAINED = {"decode"}
"""Its kernels are so small that what each takes to start, to fill the chip and to end overlaps."""


def predict(timed: Row) -> Row:
    """Compile a step that was timed, and time it by the model.

    Args:
      timed: a row of `benchmarks.gpu_train`.
    """
    model, name = timed["model"], timed["way"]
    way = WAYS[name]
    size, key = MODELS[model](), jax.random.key(0)
    with CHIP.described(), fused.on(CHIP.platform), jax.default_matmul_precision(way.matmul):
        step, begin = make_step(size, way)
        args = (*jax.eval_shape(begin, key), jax.eval_shape(size.sample, key))
        program = exported(step.__wrapped__, lambda f: f, args, {}, CHIP.platform)
    ((module, _),) = compile_all(CHIP, [program])
    time, counted = roofline(module, CHIP), traffic.measure(module)
    return {
        "model": model,
        "way": name,
        "seconds": time.seconds,
        "by_memory": time.by_memory,
        "by_products": time.by_products,
        "by_starts": time.by_starts,
        "bytes": counted.bytes,
        "kernels": counted.kernels,
        "jax": jax.__version__,
        "date": date.today().isoformat(),
    }


def seconds_of(timed: Row) -> float:
    """The step time of a timed row."""
    return items(MODELS[timed["model"]]()) / timed["items_per_second"]


def errors(timed: Sequence[Row], predicted: Sequence[Row]) -> dict[tuple[str, str], float]:
    """How far the model is off, relative to the time, for each row that has both."""
    modelled = {(row["model"], row["way"]): row["seconds"] for row in predicted}
    clocked = {(row["model"], row["way"]): seconds_of(row) for row in timed}
    return {run: modelled[run] / clocked[run] - 1 for run in clocked if run in modelled}


def table(timed: Sequence[Row], predicted: Sequence[Row]) -> str:
    """The rows as Markdown."""
    off = errors(timed, predicted)
    found = {(row["model"], row["way"]): row for row in predicted}
    lines = [
        "| model | way | timed ms | by the model, ms | error | products | memory | starts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in timed:
        run = row["model"], row["way"]
        if run not in off:
            continue
        by = found[run]
        shares = (by[name] / by["seconds"] for name in ("by_products", "by_memory", "by_starts"))
        parts = " | ".join(f"{100 * share:.0f} %" for share in shares)
        lines.append(
            f"| {row['model']} | {row['way']} | {1e3 * seconds_of(row):.1f} "
            f"| {1e3 * by['seconds']:.1f} | {100 * off[run]:+.0f} % | {parts} |"
        )
    return "\n".join(lines)


def write(page: Path, text: str) -> None:
    """Put the table between its markers."""
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def _read(path: Path) -> list[Any]:
    return json.loads(path.read_text()) if path.exists() else []


def main(argv: Sequence[str] | None = None) -> int:
    """Compile what is missing, or write the table; fail if a row is off by more than `WORST`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predicted",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--write", action="store_true", help="the table; compile nothing")
    options = parser.parse_args(argv)
    timed, predicted = _read(TIMED), _read(PREDICTED)
    known = {(row["model"], row["way"]) for row in predicted}
    for row in timed:
        run = row["model"], row["way"]
        if not options.write and run not in known and row["model"] in options.model:
            predicted.append(predict(row))
            PREDICTED.write_text(json.dumps(predicted, indent=1) + "\n")
    shown = table(timed, predicted)
    if options.write:
        write(PAGE, shown)
    print(shown)
    return int(any(map(unexplained, errors(timed, predicted).items())))


def unexplained(row: tuple[tuple[str, str], float]) -> bool:
    """Whether a row's error is larger than it may be without a reason."""
    (model, _), error = row
    return abs(error) > WORST and model not in EXPLAINED


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except JaxAmpError as error:
        raise SystemExit(str(error)) from None
