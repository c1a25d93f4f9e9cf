"""Equinox: a convolutional network with batch norm and dropout, in float32 or mixed precision.

    .venv/bin/python examples/equinox_cnn.py --policy mixed_bf16

Everything below is a float32 program but for one line, ``@amp(policy=policy)`` on the train step.
Parameters, batch statistics and optimizer state are float32 whatever the policy, so a checkpoint
of either program is a checkpoint of the other.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from jaxamp import amp

BATCH_SIZE = 64


class Net(eqx.Module):
    """Two convolutions, each normalised over the batch, then a linear classifier."""

    conv1: eqx.nn.Conv2d
    norm1: eqx.nn.BatchNorm
    conv2: eqx.nn.Conv2d
    norm2: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.conv1 = eqx.nn.Conv2d(1, 16, 3, padding=1, key=keys[0])
        self.norm1 = eqx.nn.BatchNorm(16, "batch", momentum=0.9, mode="batch")
        self.conv2 = eqx.nn.Conv2d(16, 32, 3, stride=2, padding=1, key=keys[1])
        self.norm2 = eqx.nn.BatchNorm(32, "batch", momentum=0.9, mode="batch")
        self.dropout = eqx.nn.Dropout(0.2)
        self.head = eqx.nn.Linear(32 * 4 * 4, 10, key=keys[2])

    def __call__(self, image, state, key=None):
        x, state = self.norm1(self.conv1(image[None]), state)
        x, state = self.norm2(self.conv2(jax.nn.relu(x)), state)
        x = jax.nn.relu(x).ravel()
        return self.head(self.dropout(x, key=key)), state


over_batch = {"axis_name": "batch", "in_axes": (0, None, 0), "out_axes": (0, None)}


def loss_fn(model, state, images, labels, key):
    keys = jax.random.split(key, len(images))
    logits, state = jax.vmap(model, **over_batch)(images, state, keys)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), state


def make_train_step(optimizer, policy):
    """One step of training: forward pass, gradient and update."""

    @eqx.filter_jit
    @amp(policy=policy)
    def train_step(model, state, opt_state, images, labels, key):
        value_and_grad = eqx.filter_value_and_grad(loss_fn, has_aux=True)
        (loss, state), grads = value_and_grad(model, state, images, labels, key)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, opt_state, loss

    return train_step


@eqx.filter_jit
def accuracy(model, state, images, labels):
    """The part of the pictures that is classified rightly, in float32."""
    model = eqx.nn.inference_mode(model)
    logits, _ = jax.vmap(model, axis_name="batch", in_axes=(0, None))(images, state)
    return jnp.mean(logits.argmax(-1) == labels)


def load(seed):
    """Scikit-learn's digits: training pictures and labels, then those held out."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
    split = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=seed)
    train_images, test_images, train_labels, test_labels = split
    return train_images, train_labels, test_images, test_labels


def make(seed):
    """Model, batch statistics, optimizer and its state, before training."""
    model, state = eqx.nn.make_with_state(Net)(jax.random.key(seed))
    optimizer = optax.adamw(3e-3, weight_decay=1e-3)
    return model, state, optimizer, optimizer.init(eqx.filter(model, eqx.is_array))


def save(path, *trained):
    eqx.tree_serialise_leaves(path, trained)


def restore(path, seed=0):
    model, state, _, opt_state = make(seed)
    return eqx.tree_deserialise_leaves(path, (model, state, opt_state))


def train(policy, epochs, seed=0, checkpoint=None):
    """Train under `policy`, from scratch or from a checkpoint of either precision.

    Returns the trained state, the losses, and the accuracy on held-out pictures.
    """
    images, labels, *held_out = load(seed)
    model, state, optimizer, opt_state = make(seed)
    if checkpoint is not None:
        model, state, opt_state = restore(checkpoint)
    train_step = make_train_step(optimizer, policy)
    rng, key = np.random.default_rng(seed), jax.random.key(seed + 1)
    losses = []
    for _ in range(epochs):
        order = rng.permutation(len(labels))
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            batch = order[start : start + BATCH_SIZE]
            step_key = jax.random.fold_in(key, len(losses))
            model, state, opt_state, loss = train_step(
                model, state, opt_state, images[batch], labels[batch], step_key
            )
            losses.append(float(loss))
    return (model, state, opt_state), losses, float(accuracy(model, state, *held_out))


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
