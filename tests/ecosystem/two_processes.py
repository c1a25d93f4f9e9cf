"""One of the processes of an f16 run on real data; `test_processes` starts them.

    python -m tests.ecosystem.two_processes RANK PROCESSES PORT

Each process feeds its half of every batch. In one step the last process finds a NaN in its half.
Prints what came of the run, for each way to split it, as JSON.
"""

from __future__ import annotations

import json
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

from jaxamp.training import DynamicLossScale, scaled_value_and_grad, select_tree

BATCH, STEPS, BAD_STEP = 64, 6, 3
WHOLE = {"w1": P(), "b1": P(), "w2": P()}
SPLITS = {
    "data parallel": WHOLE,
    "fsdp": {**WHOLE, "w1": P("data"), "w2": P("data")},
    "tensor parallel": {"w1": P(None, "data"), "b1": P("data"), "w2": P("data")},
    "fsdp by hand": {**WHOLE, "w1": P("data"), "w2": P("data")},
}
"""How the parameters are split over the devices; the batch is, but for tensor parallel."""


def loss_fn(params, images, labels):
    hidden = jax.nn.relu(images @ params["w1"] + params["b1"])
    logits = jax.nn.log_softmax(hidden @ params["w2"])
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))


def gathered_loss_fn(params, images, labels):
    gather = partial(jax.lax.all_gather, axis_name="data", tiled=True)
    whole = {**params, "w1": gather(params["w1"]), "w2": gather(params["w2"])}
    return jax.lax.pmean(loss_fn(whole, images, labels), "data")


def train_step(params, loss_scale, images, labels, loss_fn=loss_fn, axis_name=None):
    gradient = scaled_value_and_grad(
        loss_fn, policy="auto_mixed", loss_scale=loss_scale, axis_name=axis_name
    )
    (loss, grads), finite, loss_scale = gradient(params, images, labels)
    moved = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    return select_tree(finite, moved, params), loss_scale, loss, finite


def make_step(way, mesh, split, rows):
    if way != "fsdp by hand":
        return jax.jit(train_step)
    step = partial(train_step, loss_fn=gathered_loss_fn, axis_name="data")
    ins, outs = (split, P(), rows, rows), (split, P(), P(), P())
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=outs))


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


def train(way, mesh, rank, processes):
    """What every step reports."""
    split, rows = SPLITS[way], P() if way == "tensor parallel" else P("data")
    step = make_step(way, mesh, split, rows)
    keys = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(keys[0], (64, 128)) / 8,
        "b1": jnp.zeros(128),
        "w2": jax.random.normal(keys[1], (128, 10)) / 11,
    }
    place = partial(NamedSharding, mesh)
    params = jax.device_put(params, jax.tree.map(place, split))
    loss_scale = jax.device_put(DynamicLossScale(2.0**15), place(P()))
    largest = jax.jit(lambda a, b: jnp.stack([abs(a[k] - b[k]).max() for k in a]).max())
    norm = jax.jit(lambda params: jnp.linalg.norm(params["w1"]))
    report = []
    for local in batches(rank, processes):
        images, labels = (
            jax.make_array_from_process_local_data(place(P("data")), part) for part in local
        )
        images, labels = jax.device_put((images, labels), place(rows))
        before = params
        params, loss_scale, loss, finite = step(params, loss_scale, images, labels)
        report.append(
            {
                "loss": float(loss),
                "scale": float(loss_scale.loss_scale),
                "finite": bool(finite),
                "unmoved": float(largest(before, params)) == 0,
                "norm": float(norm(params)),
            }
        )
    return report


def main(rank: int, processes: int, port: int) -> None:
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    ways = {way: train(way, mesh, rank, processes) for way in SPLITS}
    print(json.dumps({"devices": jax.device_count(), "ways": ways}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
