"""One of the processes of a data-parallel f16 run on real data; `test_processes` starts them.

    python -m tests.ecosystem.two_processes RANK PROCESSES PORT

Each process feeds its half of every batch. In one step the last process finds a NaN in its half.
Prints what came of the run as JSON.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

from jaxamp import DynamicLossScale, value_and_grad
from jaxamp.training import select_tree

BATCH, STEPS, BAD_STEP = 64, 6, 3


def loss_fn(params, images, labels):
    hidden = jax.nn.relu(images @ params["w1"] + params["b1"])
    logits = jax.nn.log_softmax(hidden @ params["w2"])
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))


@jax.jit
def train_step(params, loss_scale, images, labels):
    gradient = value_and_grad(loss_fn, policy="auto_mixed", loss_scale=loss_scale)
    (loss, grads), finite, loss_scale = gradient(params, images, labels)
    moved = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    return select_tree(finite, moved, params), loss_scale, loss, finite


def batches(rank, processes):
    """A process's rows of every batch."""
    images, labels = load_digits(return_X_y=True)
    images = np.asarray(images / 16, np.float32)
    part = BATCH // processes
    for step in range(STEPS):
        rows = slice(step * BATCH + rank * part, step * BATCH + (rank + 1) * part)
        mine = images[rows].copy()
        if step == BAD_STEP and rank == processes - 1:
            mine[-1, 0] = np.nan
        yield mine, np.asarray(labels[rows], np.int32)


def main(rank: int, processes: int, port: int) -> None:
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    keys = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(keys[0], (64, 128)) / 8,
        "b1": jnp.zeros(128),
        "w2": jax.random.normal(keys[1], (128, 10)) / 11,
    }
    params, loss_scale = jax.device_put((params, DynamicLossScale(2.0**15)), whole)
    report = []
    for local in batches(rank, processes):
        images, labels = (jax.make_array_from_process_local_data(rows, part) for part in local)
        before = params
        params, loss_scale, loss, finite = train_step(params, loss_scale, images, labels)
        unmoved = all(
            np.array_equal(a, b)
            for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(params), strict=True)
        )
        report.append(
            {
                "loss": float(loss),
                "scale": float(loss_scale.loss_scale),
                "finite": bool(finite),
                "unmoved": unmoved,
                "norm": float(np.linalg.norm(np.asarray(params["w1"]))),
            }
        )
    print(json.dumps({"devices": jax.device_count(), "steps": report}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
