"""python -m tests.faults.loader METHOD: trains on batches that two worker processes make.

A spawned worker computes with an amped function of its own; a forked one must not touch JAX, and
works all the same beside the one that the parent has started.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp import amp

STEPS, BATCH, WIDTH = 8, 16, 6


@amp
def augment(x: jax.Array) -> jax.Array:
    """What a dataset may compute, (batch, width) to (batch, width)."""
    return jnp.tanh(x @ (jnp.eye(WIDTH) * 0.5))


class Dataset:
    """Numbered batches; carries the amped function with it to the workers."""

    def __init__(self, augment_there: bool) -> None:
        self.augment_there = augment_there
        self.augment = augment

    def __call__(self, index: int) -> tuple[int, np.ndarray]:
        x = np.random.default_rng(index).normal(size=(BATCH, WIDTH)).astype(np.float32)
        return os.getpid(), np.asarray(self.augment(x)) if self.augment_there else x


@jax.jit
@amp
def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of fitting `x @ w` to the sums of the rows of `x`."""
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - x.sum(1)) ** 2))(w)
    return w - 0.3 * grad, loss


def train(batches: list[np.ndarray]) -> list[float]:
    """The losses of as many steps as there are batches."""
    w, losses = jnp.zeros(WIDTH), []
    for x in batches:
        w, loss = step(w, x)
        losses.append(float(loss))
    return losses


def main(method: str) -> None:
    """Trains on the batches of workers and on the same batches made here; prints both."""
    dataset = Dataset(augment_there=method == "spawn")
    alone = train([dataset(index)[1] for index in range(STEPS)])
    context = multiprocessing.get_context(method)
    with warnings.catch_warnings():  # JAX warns of every fork: the workers leave it alone
        warnings.filterwarnings("ignore", ".*os.fork.*")
        pool = context.Pool(2)
    with pool:
        made = pool.map(dataset, range(STEPS), chunksize=STEPS // 2)
    fed = train([batch for _, batch in made])
    workers = sorted({pid for pid, _ in made})
    report = {"fed": fed, "alone": alone, "workers": workers, "parent": os.getpid()}
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
