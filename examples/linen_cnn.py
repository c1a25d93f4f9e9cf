"""Flax linen: a convolutional network with batch norm and dropout, float32 or mixed precision.

    .venv/bin/python examples/linen_cnn.py --policy mixed_bf16

Everything below is a float32 program but for one line, ``@amp(policy=policy)`` on the train step.
Parameters, batch statistics and optimizer state are float32 whatever the policy, so a checkpoint
of either program is a checkpoint of the other.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization
from flax.training import train_state
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from jaxamp import amp

BATCH_SIZE = 64


class Net(nn.Module):
    """Two convolutions, each normalised over the batch, then a linear classifier."""

    @nn.compact
    def __call__(self, images, train):
        x = nn.Conv(16, (3, 3))(images[..., None])
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.Conv(32, (3, 3), strides=2)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.Dropout(0.2, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(10)(x)


class TrainState(train_state.TrainState):
    """What training changes; linen's own, with the running statistics of the batches."""

    batch_stats: Any
    key: jax.Array


def make_train_step(policy):
    """One step of training: forward pass, gradient and update."""

    @jax.jit
    @amp(policy=policy)
    def train_step(state, images, labels):
        def loss_fn(params):
            logits, changed = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                images,
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": jax.random.fold_in(state.key, state.step)},
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), changed["batch_stats"]

        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, batch_stats), grads = value_and_grad(state.params)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss

    return train_step


@jax.jit
def accuracy(state, images, labels):
    """The part of the pictures that is classified rightly, in float32."""
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return jnp.mean(state.apply_fn(variables, images, train=False).argmax(-1) == labels)


def load(seed):
    """Scikit-learn's digits: training pictures and labels, then those held out."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
    split = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=seed)
    train_images, test_images, train_labels, test_labels = split
    return train_images, train_labels, test_images, test_labels


def make(seed):
    """The state before training."""
    model = Net()
    variables = model.init(jax.random.key(seed), jnp.zeros((1, 8, 8)), train=False)
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optax.adamw(3e-3, weight_decay=1e-3),
        batch_stats=variables["batch_stats"],
        key=jax.random.PRNGKey(seed + 1),
    )


def save(path, state):
    Path(path).write_bytes(serialization.to_bytes(state))


def restore(path, seed=0):
    return serialization.from_bytes(make(seed), Path(path).read_bytes())


def train(policy, epochs, seed=0, checkpoint=None):
    """Train under `policy`, from scratch or from a checkpoint of either precision.

    Returns the trained state, the losses, and the accuracy on held-out pictures.
    """
    images, labels, *held_out = load(seed)
    state = make(seed) if checkpoint is None else restore(checkpoint, seed)
    train_step = make_train_step(policy)
    rng = np.random.default_rng(seed)
    losses = []
    for _ in range(epochs):
        order = rng.permutation(len(labels))
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            batch = order[start : start + BATCH_SIZE]
            state, loss = train_step(state, images[batch], labels[batch])
            losses.append(float(loss))
    return (state,), losses, float(accuracy(state, *held_out))


def main(argv: Sequence[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="mixed_bf16", help="always_f32 for plain float32")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="a checkpoint of either precision")
    parser.add_argument("--save", type=Path, help="where to write the checkpoint")
    options = parser.parse_args(argv)
    trained, losses, score = train(options.policy, options.epochs, options.seed, options.resume)
    if options.save is not None:
        save(options.save, *trained)
    print(f"{options.policy}: loss {np.mean(losses[-22:]):.4f}, held-out accuracy {score:.2%}")
    return losses, score


if __name__ == "__main__":
    main()
