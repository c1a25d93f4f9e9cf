"""The command line of the conformance runs.

    python -m tests.conformance --sample 600      a fixed sample of JAX's primitive harnesses
    python -m tests.conformance --all             all of them
    python -m tests.conformance --products        programs × transforms × presets
    python -m tests.conformance --random 2000     random programs
    python -m tests.conformance --offsets 2000    random programs with large offsets
    python -m tests.conformance --soak            10,000 calls with changing shapes, and the like
    python -m tests.conformance --models          models of other packages
    python -m tests.conformance --placement       bytes of plans against a minimum cut
    python -m tests.conformance --meshes          programs over meshes × orders × formats
    python -m tests.conformance --jax-tests 200   of JAX's own tests of meshes, in JAX_CHECKOUT

Ends with a line 'N passed, M failed, K skipped' and is unsuccessful if anything failed.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import pathlib
import sys
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import tests.flags  # noqa: F401 - sets the XLA flags, before JAX starts
from tests.conformance.jobs import Job, Outcome
from tests.conformance.pool import run_all

COUNTED = ("random", "offsets", "jax_tests")
WHOLE = ("soak", "models", "placement", "meshes")
"""Modules of jobs: as many as are asked for, and all."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to run (one or more)")
    what.add_argument("--sample", type=int, metavar="N", help="N harnesses, all groups")
    what.add_argument("--all", action="store_true", help="every harness")
    what.add_argument("--products", action="store_true", help="the whole product")
    what.add_argument("--random", type=int, metavar="N", help="N random programs")
    what.add_argument("--offsets", type=int, metavar="N", help="N of them with large offsets")
    what.add_argument("--soak", action="store_true", help="long runs that must not grow")
    what.add_argument("--models", action="store_true", help="models of other packages")
    what.add_argument("--placement", action="store_true", help="what plans store")
    what.add_argument("--meshes", action="store_true", help="programs over meshes")
    what.add_argument("--jax-tests", type=int, metavar="N", help="N of JAX's tests of meshes")
    parser.add_argument("--only", metavar="TEXT", help="of these, jobs with TEXT in their name")
    parser.add_argument("--shard", metavar="I/N", default="1/1", help="the I-th of N parts")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--seconds", type=float, default=300, help="limit of a job (default: 300)")
    parser.add_argument(
        "--results",
        type=pathlib.Path,
        metavar="FILE",
        help="append outcomes to FILE; what has passed there is not run again",
    )
    options = parser.parse_args()
    named = ("sample", "all", "products", *COUNTED, *WHOLE)
    if not any(getattr(options, name) for name in named):
        words = (f"--{name.replace('_', '-')}" for name in named)
        parser.error(f"say what to run: {', '.join(words)}")
    return options


def _jobs(options: argparse.Namespace) -> list[Job]:
    jobs: list[Job] = []
    if options.all or options.sample:
        harnesses = importlib.import_module("tests.conformance.harnesses")
        jobs += harnesses.all_jobs() if options.all else harnesses.sample(options.sample)
    if options.products:
        jobs += importlib.import_module("tests.conformance.combinations").all_jobs()
    for name in COUNTED:
        if count := getattr(options, name):
            jobs += importlib.import_module(f"tests.conformance.{name}").all_jobs(count)
    for name in WHOLE:
        if getattr(options, name):
            jobs += importlib.import_module(f"tests.conformance.{name}").all_jobs()
    part, parts = map(int, options.shard.split("/"))
    return [job for job in jobs if (options.only or "") in str(job)][part - 1 :: parts]


def _known(results: pathlib.Path | None) -> dict[str, Outcome]:
    """Outcomes of an earlier run; failures are tried again."""
    if results is None or not results.exists():
        return {}
    rows = map(json.loads, results.read_text().splitlines())
    return {r["job"]: Outcome(r["status"], r["reason"]) for r in rows if r["status"] != "failed"}


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _run(options: argparse.Namespace, jobs: list[Job], console: Console) -> dict[str, Outcome]:
    known = _known(options.results)
    outcomes = {str(job): known[str(job)] for job in jobs if str(job) in known}
    rest = [job for job in jobs if str(job) not in outcomes]
    with _progress(console) as progress:
        bar = progress.add_task("conformance", total=len(jobs), completed=len(outcomes))
        for job, outcome in run_all(rest, workers=options.workers, seconds=options.seconds):
            outcomes[str(job)] = outcome
            if outcome.status == "failed":
                console.print(f"failed {job}: {outcome.reason}", markup=False, highlight=False)
            _append(options.results, job, outcome)
            progress.advance(bar)
    return outcomes


def _append(results: pathlib.Path | None, job: Job, outcome: Outcome) -> None:
    if results is not None:
        row = {"job": str(job), "status": outcome.status, "reason": outcome.reason}
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _summary(outcomes: Iterable[Outcome], console: Console) -> int:
    outcomes = list(outcomes)
    skipped = collections.Counter(o.reason for o in outcomes if o.status == "skipped")
    for reason, count in skipped.most_common():
        console.print(f"skipped {count}: {reason}", markup=False, highlight=False)
    count = collections.Counter(o.status for o in outcomes)
    console.print(
        f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped",
        highlight=False,
    )
    return count["failed"]


def main() -> int:
    """Runs what the command line asks for; the number of failures, at most 1."""
    options = _arguments()
    console = Console(soft_wrap=True)
    jobs = _jobs(options)
    if not jobs:
        console.print("no job has this name")
        return 1
    outcomes = _run(options, jobs, console)
    return min(_summary(outcomes.values(), console), 1)


if __name__ == "__main__":
    sys.exit(main())
