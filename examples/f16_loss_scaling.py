"""Train a deep network of sigmoids in float16: stuck without loss scaling, as good as f32 with it.

    .venv/bin/python examples/f16_loss_scaling.py

Every sigmoid makes the gradients that pass through it at least four times smaller. After six of
them most are below what float16 can hold, and become zero: the network learns nothing, and says
nothing either. Multiplied by a loss scale on the way, they arrive; divided by it in float32, they
are exact. Each training run is one compiled program for all seeds: nothing waits for a flag.
"""

import argparse
from collections.abc import Sequence
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

import jaxamp

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BATCH_SIZE, HIDDEN_LAYERS, WIDTH = 256, 6, 128

RUNS: dict[str, tuple[str, Any]] = {
    "f32": ("always_f32", jaxamp.NoOpLossScale()),
    "f16": ("auto_mixed", jaxamp.NoOpLossScale()),
    # The usual period is 2000 steps; a run of 800 is to see the scale grow.
    "f16, loss scaling": ("auto_mixed", jaxamp.DynamicLossScale(period=100)),
}

Images = Float[Array, "batch 64"]
Labels = Int[Array, "batch"]


@dataclass(frozen=True)
class Digits:
    """Scikit-learn's handwritten digits, scaled to [0, 1], a fifth of them held out."""

    train_images: Array
    train_labels: Array
    test_images: Array
    test_labels: Array

    @classmethod
    def load(cls) -> "Digits":
        """Read the data, which comes with scikit-learn."""
        images, labels = load_digits(return_X_y=True)
        images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
        train_images, test_images, train_labels, test_labels = train_test_split(
            images, labels, test_size=0.2, stratify=labels, random_state=0
        )
        return cls(*map(jnp.asarray, (train_images, train_labels, test_images, test_labels)))


def loss_fn(model: eqx.nn.MLP, images: Images, labels: Labels) -> Float[Array, ""]:
    """The mean cross-entropy of a batch."""
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@dataclass(frozen=True)
class Result:
    """What came out of one way of training, for every seed.

    Attributes:
        losses: of every step.
        zeros: which part of the gradients was exactly zero, in every step.
        scales: the loss scale of every step.
        accuracy: on the pictures that were held out.
    """

    losses: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    accuracy: np.ndarray


def train(policy: str, loss_scale: Any, digits: Digits, steps: int, seeds: int) -> Result:
    """Train from each seed's weights on that seed's batches."""
    optimizer = jaxamp.skip_nonfinite(optax.adam(5e-3, eps=1e-12))

    def run(seed: Int[Array, ""]) -> Any:
        model_key, data_key = jax.random.split(jax.random.key(seed))
        model = eqx.nn.MLP(64, 10, WIDTH, HIDDEN_LAYERS, jax.nn.sigmoid, key=model_key)
        weights, rest = eqx.partition(model, eqx.is_inexact_array)

        def step(carry: Any, key: Any) -> Any:
            weights, opt_state, scale = carry
            batch = jax.random.randint(key, (BATCH_SIZE,), 0, len(digits.train_labels))
            (loss, grads), finite, next_scale = jaxamp.filter_value_and_grad(
                loss_fn, policy=policy, loss_scale=scale
            )(eqx.combine(weights, rest), digits.train_images[batch], digits.train_labels[batch])
            updates, opt_state = optimizer.update(grads, opt_state, weights, grads_finite=finite)
            weights = eqx.apply_updates(weights, updates)
            return (weights, opt_state, next_scale), (loss, zero_part(grads), scale.loss_scale)

        carry = weights, optimizer.init(weights), loss_scale
        (weights, *_), curves = jax.lax.scan(step, carry, jax.random.split(data_key, steps))
        logits = jax.vmap(eqx.combine(weights, rest))(digits.test_images)
        return *curves, jnp.mean(jnp.argmax(logits, axis=-1) == digits.test_labels)

    return Result(*map(np.asarray, jax.jit(jax.vmap(run))(jnp.arange(seeds))))


def zero_part(grads: Any) -> Float[Array, ""]:
    """Which part of all gradients is exactly zero."""
    leaves = jax.tree.leaves(grads)
    zeros = jnp.stack([jnp.sum(leaf == 0) for leaf in leaves]).sum()
    return zeros / sum(leaf.size for leaf in leaves)


# --- What to look at afterwards ----------------------------------------------------------------


def results_table(results: dict[str, Result]) -> Table:
    """Accuracy and loss of every way of training: mean over seeds, and spread."""
    seeds = len(results["f32"].accuracy)
    table = Table(title=f"Handwritten digits, six layers of sigmoids, {seeds} seeds")
    for column in ("training", "test accuracy", "last losses", "gradients that are 0"):
        table.add_column(column, justify="left" if column == "training" else "right")
    for name, result in results.items():
        accuracy, last = result.accuracy, result.losses[:, -50:].mean(axis=1)
        table.add_row(
            name,
            f"{accuracy.mean():.1%} ± {accuracy.std():.1%}",
            f"{last.mean():.3f} ± {last.std():.3f}",
            f"{result.zeros.mean():.0%}",
        )
    return table


def plot(results: dict[str, Result], path: Path) -> None:
    """Draw the losses, what underflowed, and the loss scale; one line a seed."""
    figure, panels = plt.subplots(3, sharex=True, figsize=(8, 8), height_ratios=(2, 1, 1))
    curves, lost, scales = panels
    for index, (name, result) in enumerate(results.items()):
        style = {"color": f"C{index}", "linewidth": 0.8, "alpha": 0.8}
        lines = curves.plot(smooth(result.losses).T, **style)
        lines[0].set_label(name)
        lost.plot(smooth(result.zeros).T, **style)
        if result.scales.max() > 1:
            scales.plot(np.log2(result.scales).T, **style)
    curves.set(yscale="log", ylabel="training loss", title="Digits in float16, six sigmoids deep")
    curves.legend(loc="lower left")
    lost.set(ylabel="gradients that are 0", ylim=(-0.03, 1.03))
    scales.set(ylabel="log₂ of the loss scale", xlabel="step")
    for axes in panels:
        axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def smooth(curves: np.ndarray, width: int = 10) -> np.ndarray:
    """Running means along the last axis."""
    kernel = np.ones(width) / width
    return np.stack([np.convolve(curve, kernel, mode="valid") for curve in curves])


def main(argv: Sequence[str] | None = None) -> dict[str, Result]:
    """Train in three ways, compare, draw."""
    parser = argparse.ArgumentParser(description="Float16 with and without loss scaling.")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--picture", type=Path, default=Path("out/f16_loss_scaling.png"))
    parser.add_argument("--quick", action="store_true", help="one seed and 250 steps")
    options = parser.parse_args(argv)
    steps, seeds = (250, 1) if options.quick else (options.steps, options.seeds)

    console, digits = Console(), Digits.load()
    results = {}
    for name, (policy, loss_scale) in RUNS.items():
        with console.status(f"training: {name}"):
            results[name] = train(policy, loss_scale, digits, steps, seeds)
    console.print(results_table(results))
    plot(results, options.picture)
    console.print(f"Curves: {options.picture} (JAX {jax.__version__}, {jax.devices()[0]})")
    return results


if __name__ == "__main__":
    main()
