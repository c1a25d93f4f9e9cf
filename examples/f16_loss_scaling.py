"""Train in float16 without loss scaling, and with it: digits and characters, five seeds each.

    .venv/bin/python -m examples.f16_loss_scaling

Two ways in which gradients become too small for float16, which then makes them zero and says
nothing. The digits go through six sigmoids, each of which makes the gradients that pass it at least
four times smaller. The characters are one part in 4096 of a batch of four million, as on one of
many devices, and so is every gradient. Multiplied by a loss scale on the way, gradients arrive;
divided by it in float32, they are exact. Bfloat16 has the range of float32 and needs no scale. Each
way of training is one compiled program for all seeds: nothing waits for a flag.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from examples.char_transformer import Corpus, Transformer
from examples.char_transformer import accuracy as next_right
from examples.char_transformer import loss_fn as character_loss
from jaxamp import training

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RUNS: dict[str, tuple[str, Any]] = {
    "f32": ("always_f32", training.NoOpLossScale()),
    "bf16": ("mixed_bf16", training.NoOpLossScale()),
    "f16": ("mixed_f16", training.NoOpLossScale()),
    # The usual period is 2000 steps; a run of a few hundred is to see the scale grow.
    "f16, loss scaling": ("mixed_f16", training.DynamicLossScale(period=100)),
}

WIDTHS = (3.5, 2.0, 0.8, 0.8)  # of the curves of each

Model = Any
Batch = Any


@dataclass(frozen=True)
class Task:
    """Something to learn.

    Attributes:
        title: what it is called.
        init: a model in float32, from a random key.
        draw: a batch, from a random key.
        loss_fn: the loss of a model on a batch, which is the mean times `share`.
        share: which part of the whole batch `draw` gives.
        score: the accuracy of a model.
        steps: how many it takes.
    """

    title: str
    init: Callable[[Array], Model]
    draw: Callable[[Array], Batch]
    loss_fn: Callable[[Model, Batch], Float[Array, ""]]
    share: float
    score: Callable[[Model], Float[Array, ""]]
    steps: int


def digits() -> Task:
    """Scikit-learn's handwritten digits, a fifth of them held out, and six layers of sigmoids."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    parts = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = map(jnp.asarray, parts)

    def draw(key: Array) -> Batch:
        rows = jax.random.randint(key, (256,), 0, len(train_labels))
        return train_images[rows], train_labels[rows]

    def loss_fn(model: Model, batch: Batch) -> Float[Array, ""]:
        logits = jax.vmap(model)(batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    return Task(
        title="digits, six sigmoids deep",
        init=lambda key: eqx.nn.MLP(64, 10, 128, 6, jax.nn.sigmoid, key=key),
        draw=draw,
        loss_fn=loss_fn,
        share=1.0,
        score=lambda model: jnp.mean(jax.vmap(model)(test_images).argmax(-1) == test_labels),
        steps=800,
    )


def characters() -> Task:
    """The transformer of `char_transformer.py`, small, on its share of a batch of four million."""
    corpus = Corpus.load()
    codes, size, length = jnp.asarray(corpus.codes), 16, 64
    share = size * length / 2**22

    def draw(key: Array) -> Batch:
        starts = jax.random.randint(key, (size,), 0, len(codes) - length - 1)
        return codes[starts[:, None] + jnp.arange(length + 1)]

    (others,) = corpus.batches(1, 64, length, seed=12345)
    return Task(
        title="characters, a 4096th of a batch",
        init=lambda key: Transformer(len(corpus.alphabet), width=32, heads=4, depth=2, key=key),
        draw=draw,
        loss_fn=lambda model, batch: character_loss(model, batch) * share,
        share=share,
        score=lambda model: next_right(model, jnp.asarray(others)),
        steps=300,
    )


TASKS = {"digits": digits, "characters": characters}


@dataclass(frozen=True)
class Result:
    """What came out of one way of training, for every seed.

    Attributes:
        losses: mean loss of every step.
        zeros: which part of the gradients was exactly zero, in every step.
        scales: the loss scale of every step.
        accuracy: on other data.
    """

    losses: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    accuracy: np.ndarray


def train(task: Task, policy: str, loss_scale: Any, steps: int, seeds: int) -> Result:
    """Train from each seed's weights on that seed's batches."""
    optimizer = training.skip_nonfinite(optax.adam(5e-3, eps=1e-15))

    def run(seed: Int[Array, ""]) -> Any:
        model_key, data_key = jax.random.split(jax.random.key(seed))
        weights, rest = eqx.partition(task.init(model_key), eqx.is_inexact_array)

        def step(carry: Any, key: Any) -> Any:
            weights, opt_state, scale = carry
            gradient = training.scaled_filter_value_and_grad(
                task.loss_fn, policy=policy, loss_scale=scale
            )
            model = eqx.combine(weights, rest)
            (loss, grads), finite, next_scale = gradient(model, task.draw(key))
            updates, opt_state = optimizer.update(grads, opt_state, weights, grads_finite=finite)
            weights = eqx.apply_updates(weights, updates)
            curves = loss / task.share, zero_part(grads), scale.loss_scale
            return (weights, opt_state, next_scale), curves

        carry = weights, optimizer.init(weights), loss_scale
        (weights, *_), curves = jax.lax.scan(step, carry, jax.random.split(data_key, steps))
        return *curves, task.score(eqx.combine(weights, rest))

    return Result(*map(np.asarray, jax.jit(jax.vmap(run))(jnp.arange(seeds))))


def zero_part(grads: Any) -> Float[Array, ""]:
    """Which part of all gradients is exactly zero."""
    leaves = jax.tree.leaves(grads)
    zeros = jnp.stack([jnp.sum(leaf == 0) for leaf in leaves]).sum()
    return zeros / sum(leaf.size for leaf in leaves)


# --- What to look at afterwards ----------------------------------------------------------------


def results_table(title: str, results: dict[str, Result]) -> Table:
    """Accuracy and loss of every way of training, as means over the seeds with their deviation.

    Off is the difference of the means to float32's; for float32 the spread of its seeds is told.
    """
    table = Table(title=f"{title}, {len(results['f32'].accuracy)} seeds")
    for column in ("training", "test accuracy", "off", "last losses", "off", "zero gradients"):
        table.add_column(column, justify="left" if column == "training" else "right")
    accuracy, last = results["f32"].accuracy, last_losses(results["f32"])
    for name, result in results.items():
        scores, losses = result.accuracy, last_losses(result)
        off = abs(scores.mean() - accuracy.mean()), abs(losses.mean() - last.mean())
        if name == "f32":
            off = np.ptp(accuracy), np.ptp(last)
        word = "spread " if name == "f32" else ""
        table.add_row(
            name,
            f"{scores.mean():.1%} ± {scores.std():.1%}",
            f"{word}{off[0]:.1%}",
            f"{losses.mean():.3f} ± {losses.std():.3f}",
            f"{word}{off[1]:.3f}",
            f"{result.zeros.mean():.0%}",
        )
    return table


def last_losses(result: Result) -> Float[Array, "seeds"]:
    """The mean of each seed's last fifty losses."""
    return result.losses[:, -50:].mean(axis=1)


def plot(found: dict[str, dict[str, Result]], path: Path) -> None:
    """Draw the losses, what underflowed, and the loss scale; a column a task, one line a seed."""
    size = (1 + 6 * len(found), 8)
    figure, panels = plt.subplots(
        3, len(found), sharex="col", squeeze=False, figsize=size, height_ratios=(2, 1, 1)
    )
    for (title, results), (curves, lost, scales) in zip(found.items(), panels.T, strict=True):
        for index, (name, result) in enumerate(results.items()):
            # Curves lie on each other: those that are drawn later are thinner.
            style = {"color": f"C{index}", "linewidth": WIDTHS[index], "alpha": 0.8}
            lines = curves.plot(smooth(result.losses).T, **style)
            lines[0].set_label(name)
            lost.plot(smooth(result.zeros).T, **style)
            if result.scales.max() > 1:
                scales.plot(np.log2(result.scales).T, **style)
        curves.set(yscale="log", ylabel="training loss", title=f"Float16: {title}")
        curves.legend(loc="best")
        lost.set(ylabel="gradients that are 0", ylim=(-0.03, 1.03))
        scales.set(ylabel="log₂ of the loss scale", xlabel="step")
        for axes in (curves, lost, scales):
            axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def smooth(curves: np.ndarray, width: int = 10) -> np.ndarray:
    """Running means along the last axis."""
    kernel = np.ones(width) / width
    return np.stack([np.convolve(curve, kernel, mode="valid") for curve in curves])


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, Result]]:
    """Train each task in four ways, compare, draw."""
    parser = argparse.ArgumentParser(description="Float16 with and without loss scaling.")
    parser.add_argument("--task", choices=TASKS, action="append", help="one of them; both if none")
    parser.add_argument("--steps", type=int, help="800 for the digits, 300 for the characters")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--picture", type=Path, default=Path("out/f16_loss_scaling.png"))
    options = parser.parse_args(argv)

    console = Console()
    found = {}
    for task in [TASKS[name]() for name in options.task or TASKS]:
        results = found[task.title] = {}
        for name, (policy, loss_scale) in RUNS.items():
            with console.status(f"{task.title}: {name}"):
                steps = options.steps or task.steps
                results[name] = train(task, policy, loss_scale, steps, options.seeds)
        console.print(results_table(task.title, results))
    plot(found, options.picture)
    console.print(f"Curves: {options.picture} (JAX {jax.__version__}, {jax.devices()[0]})")
    return found


if __name__ == "__main__":
    main()
