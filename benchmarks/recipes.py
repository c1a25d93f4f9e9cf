"""Whole trainings of small models of many kinds under every preset, beside seeds of float32.

    python -m benchmarks.recipes                 the table, and JSON lines under out/
    python -m benchmarks.recipes --only vit
    python -m benchmarks.recipes --only vit --seeds 8       more of them, beside those that are kept
    python -m benchmarks.recipes --page FILE     the table as Markdown, too

A seed stands for initial weights and batches: each policy starts from the same weights and sees the
same batches as float32 does, and its mean over the seeds is compared with float32's. The spread is
the largest metric of float32's seeds less the smallest. What has been run is read from the JSON
lines, so that a run that was cut off goes on. The widths are small, so `fp8_current` scales dots of
any size here (`small=()`), first and last layers included (`ends=True`), where its preset leaves
such to bf16.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxamp
from benchmarks.any_size import of_any_size
from benchmarks.recipe_models import RECIPES, Recipe

POLICIES = (
    "always_f32",
    "mixed_bf16",
    "mixed_f16",
    "fp8_current",
    "always_f16",
    "mixed_f16_conservative",
)
SEEDS = 3
KEPT = Path("out/recipes.jsonl")


def policy(name: str) -> jaxamp.PrecisionPolicy:
    """Read a preset; that of FP8 scales small dots too."""
    return of_any_size(jaxamp.PrecisionPolicy.parse(name))


def is_float16(name: str) -> bool:
    """Whether a policy needs a loss scale."""
    return name in ("mixed_f16", "always_f16", "mixed_f16_conservative")


def trained(recipe: Recipe, name: str, seed: int, steps: int | None = None) -> Any:
    """Train a model under a policy: its parameters."""
    rng = np.random.default_rng(seed)
    params = recipe.init(rng)
    drawn = [recipe.batch(rng) for _ in range(steps or recipe.steps)]
    batches = jax.tree.map(lambda *leaves: np.stack(leaves), *drawn)
    return _training(recipe, name)(params, batches)


@functools.cache
def _training(recipe: Recipe, name: str) -> Any:
    """Compile all steps of a training as one scan."""
    optimizer = optax.adam(recipe.rate)
    scaled = is_float16(name)
    step_fn = jaxamp.training.scaled_value_and_grad

    def step(state: Any, batch: Any) -> Any:
        params, moments, scale = state
        gradient = step_fn(recipe.loss, policy=policy(name), loss_scale=scale)
        (_, grads), finite, scale = gradient(params, batch)
        updates, new = optimizer.update(grads, moments, params)
        keep = functools.partial(jax.tree.map, lambda a, b: jnp.where(finite, a, b))
        return (keep(optax.apply_updates(params, updates), params), keep(new, moments), scale), None

    def run(params: Any, batches: Any) -> Any:
        start = jaxamp.training.DynamicLossScale() if scaled else jaxamp.training.NoOpLossScale()
        params = jax.tree.map(jnp.asarray, params)
        return jax.lax.scan(step, (params, optimizer.init(params), start), batches)[0][0]

    return jax.jit(run)


def measured(key: str, name: str, seeds: Sequence[int] = range(SEEDS)) -> list[float]:
    """Train with every seed and judge: a number for each."""
    recipe = _made(key)
    score = jax.jit(recipe.score)
    return [float(score(trained(recipe, name, seed))) for seed in seeds]


@functools.cache
def _made(key: str) -> Recipe:
    return RECIPES[key]()


def off(scores: Sequence[float], reference: Sequence[float]) -> float:
    """By how many spreads of float32's seeds the mean is off."""
    spread = max(np.ptp(reference), 1e-12)
    return float(abs(np.mean(scores) - np.mean(reference)) / spread)


def rows(found: dict[str, dict[str, list[float]]]) -> list[list[str]]:
    """The cells of the table; ✗ marks a mean that is off by more than the spread."""
    lines = []
    for key, scores in found.items():
        reference = scores[POLICIES[0]]
        line = [_made(key).name, _made(key).data, _made(key).metric]
        line.append(f"{np.mean(reference):.4g} ± {np.ptp(reference):.2g}")
        for name in POLICIES[1:]:
            mark = "" if off(scores[name], reference) <= 1 else " ✗"
            line.append(f"{np.mean(scores[name]):.4g}{mark}")
        lines.append(line)
    return lines


HEADER = ["model", "data", "metric", "float32, spread", *POLICIES[1:]]


def markdown(found: dict[str, dict[str, list[float]]]) -> str:
    """The table for the docs."""
    lines = [HEADER, ["---"] * len(HEADER), *rows(found)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _kept(path: Path) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        row = json.loads(line)
        found.setdefault(row["recipe"], {})[row["policy"]] = row["scores"]
    return found


def main() -> int:
    """Run what is missing, print, write; 1 if a policy is off by more than the spread."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipes", description=__doc__)
    parser.add_argument("--only", metavar="NAME", choices=list(RECIPES))
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N")
    parser.add_argument("--results", type=Path, default=KEPT, metavar="FILE")
    parser.add_argument("--page", type=Path, metavar="FILE")
    options = parser.parse_args()
    keys = [options.only] if options.only else list(RECIPES)
    found = _kept(options.results)
    have = lambda key, name: found.get(key, {}).get(name, [])  # noqa: E731
    jobs = [(k, p) for k in keys for p in POLICIES if len(have(k, p)) < options.seeds]
    options.results.parent.mkdir(exist_ok=True, parents=True)
    for key, name in track(jobs, "training", console=Console(stderr=True)):
        kept = have(key, name)
        scores = [*kept, *measured(key, name, range(len(kept), options.seeds))]
        found.setdefault(key, {})[name] = scores
        with options.results.open("a") as file:
            file.write(json.dumps({"recipe": key, "policy": name, "scores": scores}) + "\n")
    found = {key: found[key] for key in keys}
    table = Table(*HEADER)
    for line in rows(found):
        table.add_row(*line)
    Console().print(table)
    if options.page:
        options.page.write_text(markdown(found))
    return int(any("✗" in cell for line in rows(found) for cell in line))


if __name__ == "__main__":
    raise SystemExit(main())
