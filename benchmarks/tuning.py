"""Tuning, measured: `python -m benchmarks.tuning [model ...]`.

For each program: the budget on the data that it was tuned on and on fresh data; its cost against
the cheapest of all choices of groups, by running every choice that would be 5 % cheaper; and, for
each group, the predicted error against the measured one of a run in which its values alone are
rounded. A choice is accurate enough if it leaves what `tune` leaves of the budget for other data.
Draws `out/tuning_predicted.png`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.tuning_models import MODELS, Model
from jaxamp.tools.tune import Tuning, tune
from jaxamp.tools.tune.problem import Problem
from jaxamp.tools.tune.sensitivity import is_float, predicted, relative_error, switched

OUT = Path("out")
WITHIN = 0.95  # choices that are cheaper by less are not of interest
MARGIN = 0.8  # what `tune` leaves of the budget for other data
FEW = 14
Point = tuple[float, float]


def main(names: list[str]) -> int:
    """Tunes all programs, or those whose name contains one of the words."""
    OUT.mkdir(exist_ok=True)
    chosen = [m for m in MODELS if not names or any(name in m.name for name in names)]
    table, points, tuned = _table(), {}, set()
    for model in chosen:
        problem, found = _tuned(model)
        if model.fn not in tuned:  # another budget does not change what is predicted
            points[model.name] = _groups_alone(problem)
        tuned.add(model.fn)
        _add(table, model, problem, found)
    console = Console(width=140)
    console.print(table)
    pairs = [pair for of_model in points.values() for pair in of_model]
    near = [1 / 3 <= measured / expected <= 3 for expected, measured in pairs]
    console.print(f"predicted within a factor of 3 of measured: {sum(near)} of {len(near)} groups")
    _picture(points)
    return 0


def _tuned(model: Model) -> tuple[Problem, Tuning]:
    fn = jax.grad(model.fn) if model.error == "gradient" else model.fn
    problem = Problem.of(fn, "auto_mixed_bf16", model.args(0), None)
    found = tune(model.fn, model.args(0), model.budget, error=model.error, progress=True)
    return problem, found


def _fresh_error(model: Model, found: Tuning) -> float:
    """The largest error on data of three other seeds."""
    fn = jax.grad(model.fn) if model.error == "gradient" else model.fn
    errors = []
    for seed in (1, 2, 3):
        problem = Problem.of(fn, found.policy, model.args(seed), None)
        errors.append(problem.error(np.ones(len(problem.groups), bool)))
    return max(errors)


def _optimum(model: Model, problem: Problem, found: Tuning) -> tuple[float, int]:
    """The cheapest cost that keeps the same error, and how many choices were run to know it."""
    count = len(problem.groups)
    every = (np.arange(2**count)[:, None] >> np.arange(count)) & 1 == 1
    costs = np.array([problem.cost(low) for low in track(every, f"{model.name}: costs")])
    cheaper = np.flatnonzero(costs < WITHIN * found.cost)
    for run, index in enumerate(cheaper[np.argsort(costs[cheaper], kind="stable")]):
        if problem.error(every[index]) <= MARGIN * model.budget:
            return float(costs[index]), run + 1
    return found.cost, len(cheaper)


def _groups_alone(problem: Problem) -> list[Point]:
    """Predicted and measured error of the roundings of each group alone, where there are any."""
    ones = np.eye(len(problem.groups), dtype=bool)
    expected = predicted(problem.matrix(), ones)
    reference = [r for r in problem.reference if is_float(r)]
    run = jax.jit(lambda on, *args: switched(problem.block, problem.groups, on, args))
    measured = [relative_error(run(one.astype(float), *problem.args), reference) for one in ones]
    return [(e, m) for e, m in zip(expected.tolist(), measured, strict=True) if e > 0 or m > 0]


def _table() -> Table:
    table = Table(title="tuning")
    table.add_column("program")
    for heading in (
        "groups", "runs", "budget", "error", "fresh data", "time, f32 = 1", "all low", "optimum",
        "choices run for it",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    return table


def _add(table: Table, model: Model, problem: Problem, found: Tuning) -> None:
    groups = len(problem.groups)
    best, runs = _optimum(model, problem, found) if groups <= FEW else (float("nan"), 0)
    table.add_row(
        model.name, str(groups), str(found.runs), f"{model.budget:.1e}", f"{found.error:.2e}",
        f"{_fresh_error(model, found):.2e}", f"{found.cost / found.cost_f32:.3f}",
        f"{found.cost_low / found.cost_f32:.3f}", f"{best / found.cost_f32:.3f}", str(runs),
    )  # fmt: skip


def _picture(points: dict[str, list[Point]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 5), layout="constrained")
    axes = figure.subplots()
    for name, pairs in points.items():
        axes.plot(*zip(*pairs, strict=True), "o", markersize=4, label=name)
    ends = np.array([1e-6, 1.0])
    axes.plot(ends, ends, color="0.4", linewidth=0.8)
    axes.fill_between(ends, ends / 3, ends * 3, color="0.9", label="within a factor of 3")
    axes.set(xscale="log", yscale="log", xlabel="predicted error", ylabel="measured error")
    axes.legend(fontsize="small")
    figure.savefig(OUT / "tuning_predicted.png", dpi=150)


if __name__ == "__main__":
    reader = argparse.ArgumentParser(prog="python -m benchmarks.tuning", description=__doc__)
    reader.add_argument("names", nargs="*", metavar="model", help="words of the models' names")
    sys.exit(main(reader.parse_args().names))
