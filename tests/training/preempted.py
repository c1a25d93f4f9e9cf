"""A float16 run that writes a checkpoint after every step, and is killed in the midst of one.

    python -m tests.training.preempted FOLDER STEP

`test_preemption` starts it, and goes on from what it has left.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

from jaxamp import training

STEPS, BATCH, BAD_STEP = 8, 64, 2
OPTIMIZER = training.skip_nonfinite(
    optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, STEPS))
    )
)


def loss_fn(params: Any, images: Any, labels: Any, keys: Any) -> jax.Array:
    """A layer with dropout, and a classifier."""
    hidden = jax.nn.gelu(images @ params["w1"])
    hidden = hidden * jax.random.bernoulli(keys[0], 0.8, hidden.shape) / 0.8
    logits = hidden @ params["w2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def train_step(state: Any, images: Any, labels: Any) -> Any:
    """One step in two micro-batches; everything that it changes is in the state."""
    params, opt_state, scale, key = state
    key, used = jax.random.split(jax.random.wrap_key_data(key))
    gradient = training.scaled_value_and_grad(loss_fn, policy="auto_mixed", loss_scale=scale)
    loss, grads = optax.microbatch(
        lambda *args: gradient(*args).result,
        argnums=(1, 2, 3),
        microbatch_size=BATCH // 2,
        accumulator=optax.microbatching.AccumulationType.MEAN,
    )(params, images, labels, jax.random.split(used, BATCH))
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    scale = scale.adjust(opt_state.grads_finite)
    state = optax.apply_updates(params, updates), opt_state, scale, jax.random.key_data(key)
    return state, loss


def start() -> Any:
    """The state before the first step."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "w1": jax.random.normal(keys[0], (64, 32)) / 8,
        "w2": jax.random.normal(keys[1], (32, 10)) / 6,
    }
    scale = training.DynamicLossScale(2.0**12, period=3)
    scale = jax.tree.map(jnp.asarray, scale)
    return params, OPTIMIZER.init(params), scale, jax.random.key_data(keys[2])


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures and labels of a step; in one there is a NaN."""
    images, labels = load_digits(return_X_y=True)
    rows = slice(step * BATCH, (step + 1) * BATCH)
    images = (images[rows] / 16).astype(np.float32)
    images[0, 0] = np.nan if step == BAD_STEP else images[0, 0]
    return images, labels[rows].astype(np.int32)


def restored(folder: Path) -> tuple[int, Any]:
    """The newest checkpoint: how many steps it has seen, and its state."""
    steps = max(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    with ocp.StandardCheckpointer() as checkpointer:
        return steps, checkpointer.restore(folder / str(steps), start())


def main(folder: Path, killed_in: int) -> None:
    state = start()
    with ocp.StandardCheckpointer() as checkpointer:
        for step in range(STEPS):
            state, _ = train_step(state, *batch(step))
            if step == killed_in:  # computed, perhaps, but saved nowhere
                os.kill(os.getpid(), signal.SIGKILL)
            checkpointer.save(folder / str(step + 1), state)
            checkpointer.wait_until_finished()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
