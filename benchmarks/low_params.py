"""Parameters kept in bfloat16, in four ways, against float32: five seeds on the digits.

    python -m benchmarks.low_params

A two-layer network, Adam with a rate that goes to zero, 3000 steps. The difference is the largest
over the seeds, from the same weights on the same batches; the spread is the largest of float32's
losses less the smallest.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

from jaxamp import training

BATCH = 32
HELD_OUT = 360
STEPS = 3000


def adam() -> optax.GradientTransformation:
    """Adam with a rate that goes to zero, where steps become too small for bfloat16."""
    return optax.adam(optax.cosine_decay_schedule(1e-3, STEPS))


METHODS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "float32": (jnp.float32, adam),
    "bf16, master weights": (jnp.bfloat16, lambda: training.with_master_weights(adam())),
    "bf16, stochastic rounding": (
        jnp.bfloat16,
        lambda: training.with_stochastic_rounding(adam()),
    ),
    "bf16, Kahan": (jnp.bfloat16, lambda: training.with_kahan(adam())),
    "bf16 alone": (jnp.bfloat16, adam),
}
"""In what parameters are kept, and the optimizer that updates them."""


@functools.cache
def data() -> tuple[np.ndarray, ...]:
    """Training images and labels, then those held out."""
    images, labels = map(np.asarray, load_digits(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    return images[HELD_OUT:], labels[HELD_OUT:], images[:HELD_OUT], labels[:HELD_OUT]


def init(rng: np.random.Generator, width: int) -> dict[str, np.ndarray]:
    """Weights in float32."""
    params = {
        "w1": rng.normal(size=(64, width)) * (2 / 64) ** 0.5,
        "b1": np.zeros(width),
        "w2": rng.normal(size=(width, 10)) * (1 / width) ** 0.5,
        "b2": np.zeros(10),
    }
    return {name: value.astype(np.float32) for name, value in params.items()}


def logits(params: dict[str, jax.Array], images: Any) -> jax.Array:
    """Computed in the dtype of the parameters."""
    x = images.astype(params["w1"].dtype)
    x = jax.nn.relu(x @ params["w1"] + params["b1"])
    return (x @ params["w2"] + params["b2"]).astype(jnp.float32)


def loss_fn(params: dict[str, jax.Array], images: Any, labels: Any) -> jax.Array:
    """Mean cross-entropy."""
    rows = logits(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(rows, labels).mean()


def train(method: str, *, steps: int = STEPS, width: int = 32, seeds: int = 5) -> Any:
    """Final training loss and held-out accuracy, for each seed, of one of the methods."""
    dtype, make_optimizer = METHODS[method]
    images, labels, test_images, test_labels = map(jnp.asarray, data())
    rngs = [np.random.default_rng(seed) for seed in range(seeds)]
    first = jax.tree.map(lambda *w: jnp.stack(w).astype(dtype), *(init(r, width) for r in rngs))
    batches = np.stack([r.integers(len(labels), size=(steps, BATCH)) for r in rngs])
    optimizer = make_optimizer()

    def step(carry: Any, batch: Any) -> Any:
        params, state = carry
        grads = jax.grad(loss_fn)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    @jax.vmap
    def of_seed(params: Any, images: Any, labels: Any) -> Any:
        return jax.lax.scan(step, (params, optimizer.init(params)), (images, labels))[0][0]

    @jax.jit
    @jax.vmap
    def score(params: Any) -> Any:
        right = jnp.argmax(logits(params, test_images), axis=-1) == test_labels
        return {"loss": loss_fn(params, images, labels), "accuracy": jnp.mean(right)}

    params = of_seed(first, images[batches], labels[batches])
    wide = jax.tree.map(lambda w: w.astype(jnp.float32), params)
    return jax.tree.map(np.asarray, score(wide))


def measure() -> dict[str, dict[str, np.ndarray]]:
    """What every method ends with."""
    return {method: train(method) for method in METHODS}


def table(found: dict[str, dict[str, np.ndarray]]) -> Table:
    """Means over the seeds, and the largest difference to float32 beside float32's spread."""
    reference = found["float32"]
    columns = ("loss", "differs by", "f32 spread", "accuracy", "differs by", "f32 spread")
    result = Table("parameters", *columns)
    for method, scores in found.items():
        cells = []
        for key in ("loss", "accuracy"):
            difference = np.abs(scores[key] - reference[key]).max()
            numbers = scores[key].mean(), difference, np.ptp(reference[key])
            cells += [f"{number:.4f}" for number in numbers]
        result.add_row(method, *cells)
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Train everything and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.low_params",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(argv)
    Console(width=110).print(table(measure()))


if __name__ == "__main__":
    main()
