"""All that is asked of a GPU that is lent for minutes, in one command; rows that matter first.

    python -m benchmarks.on_a_gpu                     8 minutes, docs/gpu_train.json, a table
    python -m benchmarks.on_a_gpu --minutes 4         cut there; called again it goes on
    python -m benchmarks.on_a_gpu --toy --json FILE   sizes for a CPU, to try the script

It needs JAX, flax, equinox, optax and this checkout. Models are those of `benchmarks.gpu_models`,
ways those of `benchmarks.gpu_train`. Two processes have a model each: one traces while the other
has the device, which a lock gives to one at a time, to compile (XLA tries kernels there) or to
time. A model's ways are timed in rounds whose order alternates, as the second of two is slower
where the chip is at its limit of power; milliseconds are medians. Two more steps are profiled in
the same process: `busy` is the sum of their kernels. The two worst rows are shown kernel by kernel,
beside the hand's.

Every round is kept, under out/on_a_gpu, and is not run again on the same device and JAX. Figures of
another device are refused.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from benchmarks import gpu_train
from benchmarks.gpu_models import MODELS, TOYS
from benchmarks.gpu_train import WAYS, File, Row, Version

ROWS = {
    "wide": ("hand-fused", "amp-bf16", "amp-fp8", "amp-fp8-delayed", "amp-fp8-carried"),
    "350m": ("hand-fused", "amp-bf16", "amp-bf16-stored", "amp-loss-bf16"),
    "1.3b": ("hand-fused", "amp-bf16", "amp-bf16-stored", "amp-loss-bf16"),
    "ssd": ("hand-bf16", "amp-bf16", "amp-bf16-stored"),
    "decode": ("hand-bf16", "amp-bf16"),
    "vit-b": ("hand-fused", "amp-bf16", "amp-loss-bf16"),
    "resnet50": ("hand-bf16", "amp-bf16", "amp-loss-bf16"),
    "350m-products": ("hand-fused", "amp-loss-bf16"),
    "350m-everything": ("hand-fused", "amp-loss-bf16"),
}
"""What is timed, in order; the first way of a model is its strongest hand."""

MINUTES, ROUNDS, ROUND, PROFILED = 8.0, 3, 0.5, 2
"""Of the whole; rounds of a way, and seconds of one; steps that are profiled."""

KERNELS = 16
WORST = 2
ATONCE = 2  # processes, of which one has the device
SHARE = 0.45  # of the device's memory, for each


# One model, in a process of its own.


def measure(model: str, options: argparse.Namespace) -> None:
    """Compile, time and profile the ways of a model that are not known yet, until time is over."""
    folder: Path = options.folder
    file = File(folder / f"{model}.json", options.toy)
    file.check(jax.devices()[0].device_kind)
    alone = partial(_alone, folder / "device")
    size = (TOYS if options.toy else MODELS)[model]()
    late = lambda: time.time() > options.until  # noqa: E731
    versions: dict[str, Version] = {}
    for way in options.way or ROWS[model]:
        row = file.rows.get((model, way), {})
        if "kernels" in row and len(row["rounds"]) >= options.rounds:
            continue
        if late():
            return
        with gpu_train._noted(file, model, way, options.toy) as row:
            versions[way], facts = gpu_train.compiled(
                size, replace(WAYS[way], any_size=options.toy), alone
            )
            row |= facts
    for number in range(options.rounds):
        for way in list(versions)[:: 1 if number % 2 == 0 else -1]:
            if file.rounds(model, way) > number or "error" in file.rows[model, way]:
                continue
            with alone(), gpu_train._noted(file, model, way, options.toy) as row:
                if late():
                    return
                gpu_train.one_round(versions[way], row, options.seconds)
    for way, version in versions.items():
        if late():
            return
        if "error" not in file.rows[model, way]:
            with alone(), gpu_train._noted(file, model, way, options.toy) as row:
                row["kernels"], row["busy_ms"] = profile(version)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the device: no other process compiles or times meanwhile."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def profile(version: Version) -> tuple[list[tuple[str, float, float]], float]:
    """Profile steps that have run before.

    Returns:
      Of one step, name, runs and milliseconds of the kernels that take most; milliseconds of all.
    """
    batches = gpu_train._batches(version.size)
    params, state = version.begin(jax.random.key(0))
    ready = [next(batches) for _ in range(1 + PROFILED)]
    params, state, _ = jax.block_until_ready(version.steps[0](params, state, ready[0]))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for batch in ready[1:]:
                params, state, _ = version.steps[-1](params, state, batch)
            jax.block_until_ready(params)
        (path,) = Path(folder).rglob("*.xplane.pb")
        found = kernels(jax.profiler.ProfileData.from_file(str(path)))
    runs, spent = Counter(name for name, _ in found), defaultdict[str, float](float)
    for name, milliseconds in found:
        spent[name] += milliseconds / PROFILED
    longest = sorted(spent.items(), key=lambda kernel: -kernel[1])[:KERNELS]
    return [(name, runs[name] / PROFILED, ms) for name, ms in longest], sum(spent.values())


def kernels(data: Any) -> list[tuple[str, float]]:
    """Return name and milliseconds of each kernel in a profile; none of a CPU."""
    planes = [plane for plane in data.planes if plane.name.startswith("/device:GPU")]
    streams = [line for plane in planes for line in plane.lines if "Stream" in line.name]
    return [(event.name, event.duration_ns / 1e6) for line in streams for event in line.events]


# All of them.


def main(argv: Sequence[str] | None = None) -> int:
    """Run the processes until all is known or time is over, and show what is known."""
    options = _parser().parse_args(argv)
    if options.here:
        measure(options.here, options)
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    options.until = time.time() + 60 * options.minutes
    waiting, running = list(options.model), list[subprocess.Popen[bytes]]()
    try:
        while waiting or running:
            while waiting and len(running) < ATONCE and time.time() < options.until:
                running.append(
                    subprocess.Popen(_command(waiting.pop(0), options), env=_variables())
                )
            running = [process for process in running if process.poll() is None]
            if time.time() > options.until + options.grace:
                break
            if time.time() > options.until:
                waiting = []
            time.sleep(0.2)
    finally:
        for process in running:
            process.kill()
        rows = _kept(options)
        keep(rows, options.json)
        print("\n".join(report(rows)))
    wanted = {(model, way) for model in options.model for way in options.way or ROWS[model]}
    known = {(row["model"], row["way"]) for row in rows if "kernels" in row}
    print(f"{len(wanted & known)} of {len(wanted)} rows are whole; figures are in {options.json}")
    return int(not wanted <= known)


def _variables() -> dict[str, str]:
    shared = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": str(SHARE),
    }
    return os.environ | shared


def _command(model: str, options: argparse.Namespace) -> list[str]:
    words = ["--here", model, "--until", str(options.until), "--folder", str(options.folder)]
    words += ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
    words += ["--way", *options.way] if options.way else []
    toy = ["--toy"] if options.toy else []
    return [sys.executable, "-m", "benchmarks.on_a_gpu", *words, *toy]


def _kept(options: argparse.Namespace) -> list[Row]:
    """Return the rows of all models, those of this JAX alone."""
    files = (File(options.folder / f"{model}.json", options.toy) for model in options.model)
    rows = [row for file in files for row in file.rows.values()]
    for row in rows:
        if "rounds" in row:
            size = (TOYS if options.toy else MODELS)[row["model"]]()
            row["ms"] = 1e3 * gpu_train.items(size) / row["items_per_second"]
    return rows


def keep(rows: Sequence[Row], path: Path) -> None:
    """Put rows into a file of figures, in place of older ones of the same model and way.

    Raises:
      SystemExit: the file's figures are of another device.
    """
    found = {(row["model"], row["way"]): row for row in _read(path)}
    found |= {(row["model"], row["way"]): row for row in rows if "rounds" in row}
    devices = {row["device"] for row in found.values()}
    if len(devices) > 1:
        raise SystemExit(f"{path} would mix {', '.join(sorted(devices))}: name another by --json.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*found.values()], indent=1) + "\n")


def _read(path: Path) -> list[Row]:
    return json.loads(path.read_text()) if path.exists() else []


def report(rows: Sequence[Row]) -> Iterator[str]:
    """Return the table in Markdown, and the kernels of the two worst rows beside the hand's."""
    yield from table(rows)
    for row in rows:
        if "error" in row:
            yield f"{row['model']} {row['way']}: {row['error']}"
    timed = _timed(rows)
    whole = {run: row for run, row in timed.items() if "kernels" in row}
    ratios = {run: _ratio(timed, run) for run in whole if (run[0], ROWS[run[0]][0]) in whole}
    others = [run for run in ratios if run[1] != ROWS[run[0]][0]]
    for model, way in sorted(others, key=ratios.__getitem__)[:WORST]:
        for one in (ROWS[model][0], way):
            yield f"\n{model}, {one}: {timed[model, one]['busy_ms']:.2f} ms busy"
            for name, runs, ms in timed[model, one]["kernels"]:
                yield f"  {ms:7.3f} x {runs:4g}  {name}"


HEADS = "model", "way", "ms", "spread", "busy ms", "peak GiB", "trace + compile s", "of the hand"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the rows that are timed as a table in Markdown."""
    yield f"| {' | '.join(HEADS)} |"
    yield "|---" * len(HEADS) + "|"
    timed = _timed(rows)
    for (model, way), row in timed.items():
        waits = f"{row['tracing_seconds']:.1f} + {row['compiling_seconds']:.1f}"
        busy = f"{row['busy_ms']:.2f}" if "busy_ms" in row else "–"
        cells = f"{row['ms']:.2f} | {100 * row['spread']:.1f} % | {busy}"
        peak, ratio = f"{row['peak_bytes'] / 2**30:.2f}", _ratio(timed, (model, way))
        yield f"| {model} | {way} | {cells} | {peak} | {waits} | {ratio:.3f} |"


def _timed(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    """Return what is timed, in the order in which it is asked for."""
    found = {(row["model"], row["way"]): row for row in rows if "rounds" in row}
    asked = [(model, way) for model, ways in ROWS.items() for way in ways]
    return {run: found[run] for run in asked if run in found}


def _ratio(timed: dict[tuple[str, str], Row], run: tuple[str, str]) -> float:
    """Return the speed of a row in that of the strongest hand; NaN where that is not timed."""
    hand = timed.get((run[0], ROWS[run[0]][0]))
    return hand["ms"] / timed[run]["ms"] if hand else math.nan


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_a_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--way", nargs="+", choices=WAYS, help="others than the usual")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=ROUND, help="of a round")
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU")
    parser.add_argument("--json", type=Path, default=Path("docs/gpu_train.json"))
    parser.add_argument("--folder", type=Path, default=Path("out/on_a_gpu"), help="rows of a run")
    parser.add_argument("--grace", type=float, default=20, help="seconds to end a stage in")
    parser.add_argument("--here", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
