"""What each analysis of numerical hazards is worth: programs that change or break without it.

    python -m tests.plan.ablation                      every analysis on every program
    python -m tests.plan.ablation --only singularities lookup_places
    python -m tests.plan.ablation --plans              whose plans change; runs nothing
    python -m tests.plan.ablation --results FILE       go on where an earlier run has stopped

Each analysis is switched off in turn. Programs whose plan changes are run: the hostile ones and
those of the fields, in both formats, the latter in both orders as well. The models of
`benchmarks.deviceless`, at their small size, are planned alone.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

from rich.console import Console
from rich.progress import track
from rich.table import Table

import tests.flags  # noqa: F401 - sets the XLA flags, before JAX starts
from jaxamp.core.intervals import ANYWHERE
from jaxamp.plan.conditioning.amplification import Amplified

HAZARDS = "jaxamp.plan.conditioning.hazards"
CANCELLED = "jaxamp.cancellation.cancelled_products"
CHOICE = "jaxamp.plan.precision.choose"


def _nothing(*_: Any, **__: Any) -> frozenset[int]:
    return frozenset()


def _no_flags(graph: Any, *_: Any) -> bytearray:
    return bytearray(len(graph.avals))


def _no_readers(*_: Any) -> dict[int, Any]:
    return {}


def _no_list(*_: Any) -> list[Any]:
    return []


def _no_sizes(graph: Any, *_: Any) -> list[int]:
    return [0] * len(graph.avals)


def _no_reasons(*_: Any) -> dict[Any, Any]:
    return {}


def _no_ranges(graph: Any) -> None:
    graph.ranges = [ANYWHERE] * len(graph.avals)
    graph.whole = bytearray(len(graph.avals))


ANALYSES: dict[str, tuple[str, Any]] = {
    "amplification": (f"{HAZARDS}.find_amplified", lambda *_: Amplified()),
    "forget_gates": (f"{HAZARDS}.find_forget_gates", _nothing),
    "unrolled_recurrences": (f"{HAZARDS}.find_unrolled_recurrences", _no_list),
    "lookup_places": ("jaxamp.plan.dataflow.uses.PLACE", 0),
    "precise_products": ("jaxamp.plan.planner.enter_products", _nothing),
    "squares": (f"{CANCELLED}.find_cancelled", _no_reasons),
    "residues": (f"{CANCELLED}.find_residues", _no_reasons),
    "remainders": ("jaxamp.cancellation.residues.find_remainders", _no_reasons),
    "finite_differences": ("jaxamp.cancellation.remainders.find_slopes", _nothing),
    "undone_sums": ("jaxamp.plan.planner.find_undone", _nothing),
    "solver_steps": (f"{CANCELLED}.find_solver_steps", _no_reasons),
    "singularities": (f"{HAZARDS}.find_singularities", _no_flags),
    "small_divisors": (f"{HAZARDS}.find_small_divisors", _no_flags),
    "divided": (f"{HAZARDS}.find_divided", _nothing),
    "rescaled_products": (f"{CHOICE}.find_rescaled_products", _nothing),
    "split_lookups": (f"{CHOICE}.find_split_lookups", _nothing),
    "transposed_lookups": ("jaxamp.plan.dataflow.uses.find_transposed_lookups", _nothing),
    "many_readers": ("jaxamp.plan.precision.operand_reads.find_many_readers", _no_readers),
    "product_sizes": (f"{CHOICE}.find_product_sizes", _no_sizes),
    "ranges": ("jaxamp.plan.planner.find_ranges", _no_ranges),
}
"""For each analysis its function or flag, and what stands in its place to find nothing."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A program in one format and order.

    Attributes:
      corpus: where it is from.
      run: its name, the format, and the order if there are several.
      low: the format.
      traced: returns its jaxpr.
      wrong: runs it, and returns whether the result is beyond the corpus' bound; ``None`` if it is
        planned alone.
    """

    corpus: str
    run: str
    low: str
    traced: Callable[[], Any]
    wrong: Callable[[], bool] | None = None


@contextlib.contextmanager
def _planned_anew(measure: Any) -> Iterator[None]:
    """Let `amp` get a function of its own in each run: it remembers plans of functions."""
    amp = measure.amp

    def of_copy(fn: Callable[..., Any], *words: Any, **named: Any) -> Any:
        return amp(lambda *args: fn(*args), *words, **named)

    with mock.patch.object(measure, "amp", of_copy):
        yield


@contextlib.contextmanager
def without(analysis: str) -> Iterator[None]:
    """Switch an analysis off."""
    with mock.patch(*ANALYSES[analysis]):
        yield


def _hostile() -> Iterator[Program]:
    jax, measure = map(importlib.import_module, ("jax", "tests.numerics.measure"))
    for name, case in measure.CASES.items():
        traced = functools.cache(functools.partial(_traced, jax, case.fn, case.args))
        for low in measure.LOW:

            def wrong(name: str = name, low: str = low) -> bool:
                measure.result.cache_clear()
                with _planned_anew(measure):
                    return not measure.Measured(measure.CASES[name], low).holds

            yield Program("hostile", f"{name} {low}", low, traced, wrong)


def _fields() -> Iterator[Program]:
    jax, measure = map(importlib.import_module, ("jax", "tests.fields.measure"))
    for name, program in measure.FIELD_PROGRAMS.items():
        by_order = {}
        for low, order in measure.cases(name):
            whole = order == measure.ORDERS[1]
            fn = measure.ordered(program, order) if whole else program.fn
            if order not in by_order:
                by_order[order] = functools.cache(functools.partial(_traced, jax, fn, program.args))

            def wrong(name: str = name, low: str = low, order: str = order) -> bool:
                with _planned_anew(measure):
                    return measure.measured(name, low, order).wrong

            yield Program("fields", f"{name} {low} {order}", low, by_order[order], wrong)


def _models() -> Iterator[Program]:
    jax, models = map(importlib.import_module, ("jax", "benchmarks.deviceless.models"))
    for name, model in models.EVERY.items():
        loss = model.small.plain
        orders = {"forward": loss}
        if model.small.gradient:
            orders["amp(grad)"] = jax.value_and_grad(loss, has_aux=True)
        for order, fn in orders.items():
            traced = functools.cache(functools.partial(_traced_model, jax, fn, model.small))
            for low in ("bf16", "f16"):
                yield Program("models", f"{name} {low} {order}", low, traced)


CORPORA = {"hostile": _hostile, "fields": _fields, "models": _models}


def _traced(jax: Any, fn: Callable[..., Any], args: Any) -> Any:
    return jax.make_jaxpr(fn)(*args)


def _traced_model(jax: Any, fn: Callable[..., Any], size: Any) -> Any:
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, batch = jax.eval_shape(size.init, key), jax.eval_shape(size.sample, key)
    return jax.make_jaxpr(fn)(params, batch)


def fingerprint(program: Program) -> int:
    """Return a hash of everything that a program's plan emits."""
    ulps, planner = map(importlib.import_module, ("tests.numerics.ulps", "jaxamp.plan.planner"))
    policy = importlib.import_module("jaxamp").PrecisionPolicy.parse(ulps.POLICIES[program.low])
    plan = planner.plan_program(program.traced(), policy)
    return hash(tuple(_emitted(decision) for decision in plan.body.walk()))


def _emitted(decision: Any) -> tuple[Any, ...]:
    plan = decision.plan
    return plan.reads, plan.outputs, plan.accumulation


def effects(program: Program, analyses: Iterable[str], runs: bool) -> Iterator[dict[str, Any]]:
    """Yield what becomes of a program without each analysis that changes its plan."""
    base = fingerprint(program)
    for analysis in analyses:
        with without(analysis):
            if fingerprint(program) != base:
                wrong = program.wrong() if runs and program.wrong else None
                yield {"analysis": analysis, "run": program.run, "wrong": wrong}


def _known() -> set[str]:
    known = importlib.import_module("tests.fields.known").KNOWN
    return {run for runs in known.values() for run in runs}


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Draw, for each analysis and corpus, how many runs change and how many of them break."""
    drawn = Table(title="without it: plans that change, and runs that break")
    for word in ("analysis", *CORPORA):
        drawn.add_column(word, justify="left" if word == "analysis" else "right")
    known = _known()
    for analysis in ANALYSES:
        cells = []
        for corpus in CORPORA:
            of_it = [r for r in rows if r["analysis"] == analysis and r["corpus"] == corpus]
            broken = [r for r in of_it if r["wrong"] and r["run"] not in known]
            cells.append(f"{len(of_it)}, {len(broken)} break" if broken else str(len(of_it)))
        drawn.add_row(analysis, *cells)
    return drawn


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.plan.ablation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=ANALYSES, default=list(ANALYSES))
    parser.add_argument("--corpus", nargs="+", choices=CORPORA, default=list(CORPORA))
    parser.add_argument("--plans", action="store_true", help="compare plans, run nothing")
    parser.add_argument("--results", type=pathlib.Path, metavar="FILE", help="kept between runs")
    return parser.parse_args()


def main() -> int:
    """Switch the analyses off and print what changes."""
    options = _arguments()
    kept = options.results
    lines = kept.read_text().splitlines() if kept and kept.exists() else []
    rows = [json.loads(line) for line in lines]
    done = {(row["corpus"], row["run"]) for row in rows}
    programs = [p for corpus in options.corpus for p in CORPORA[corpus]()]
    rest = [p for p in programs if (p.corpus, p.run) not in done]
    for program in track(rest, "ablating", console=Console(stderr=True)):
        new = [
            {"corpus": program.corpus, **row}
            for row in effects(program, options.only, not options.plans)
        ]
        rows += new
        if kept:
            none = {"corpus": program.corpus, "analysis": None, "run": program.run, "wrong": None}
            with kept.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in (*new, none))
    Console(soft_wrap=True).print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
