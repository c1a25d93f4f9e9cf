"""Train one program in float32 and in mixed precision, and show both: what the recipes share."""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib
import numpy as np

from jaxamp import amp, report

matplotlib.use("Agg")
import matplotlib.pyplot as plt

POLICIES = ("always_f32", "mixed_bf16")


class Recipe(NamedTuple):
    """A float32 program: nothing in it knows of precision.

    Attributes:
      name: what it is called.
      start: returns the state that training starts from.
      step: of a state and a batch, the next state and the loss.
      batches: returns as many batches as are asked for, the same ones each time.
      steps: how many a run has.
    """

    name: str
    start: Callable[[], Any]
    step: Callable[[Any, Any], tuple[Any, jax.Array]]
    batches: Callable[[int], Iterable[Any]]
    steps: int


def compare(recipe: Recipe, steps: int, picture: Path) -> dict[str, np.ndarray]:
    """Train under each policy from one start on the same batches; print, draw, return losses."""
    losses = {}
    for policy in POLICIES:
        step = amp(recipe.step, policy)  # the one line about precision
        state = recipe.start()
        run = jax.jit(step, donate_argnums=0)
        found, begun, batch = [], time.perf_counter(), None
        for batch in recipe.batches(steps):
            state, loss = run(state, batch)
            found.append(float(loss))
        losses[policy] = np.array(found)
        print(f"{policy}: loss {np.mean(found[-10:]):.4f}, {time.perf_counter() - begun:.0f} s")
        if jax.default_backend() != "cpu":  # a CPU widens 16 bits, and needs more memory for them
            memory = run.lower(state, batch).compile().memory_analysis()
            assert memory is not None
            print(f"  temporary memory: {memory.temp_size_in_bytes / 2**20:.1f} MiB")
        if policy != POLICIES[0]:
            print(report(step)(state, batch))
    draw(recipe.name, losses, picture)
    print(f"losses: {picture}")
    return losses


def draw(title: str, losses: dict[str, np.ndarray], picture: Path) -> None:
    """Draw the curves, the wider one below."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for (policy, curve), width in zip(losses.items(), (3.0, 1.2), strict=True):
        axes.plot(curve, label=policy, linewidth=width)
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def main(recipe: Recipe, argv: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Run a recipe from the command line."""
    parser = argparse.ArgumentParser(description=recipe.name)
    parser.add_argument("--steps", type=int, default=recipe.steps)
    name = recipe.name.replace(" ", "_")
    parser.add_argument("--picture", type=Path, default=Path(f"out/{name}.png"))
    options = parser.parse_args(argv)
    return compare(recipe, options.steps, options.picture)
