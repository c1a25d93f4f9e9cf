"""Flax nnx: a convolutional network with batch norm and dropout, float32 or mixed precision.

    .venv/bin/python examples/nnx_cnn.py --policy mixed_bf16

Everything below is a float32 program but for one line, ``@amp(policy=policy)`` on the train step.
Parameters, batch statistics and optimizer state are float32 whatever the policy, so a checkpoint
of either program is a checkpoint of the other.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from jaxamp import amp

BATCH_SIZE = 64


class Net(nnx.Module):
    """Two convolutions, each normalised over the batch, then a linear classifier."""

    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(32 * 4 * 4, 10, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.norm1(self.conv1(images[..., None])))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return self.head(self.dropout(x.reshape(len(x), -1)))


def loss_fn(model, images, labels):
    logits = model(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_train_step(policy):
    """One step of training: forward pass, gradient and update, in place as nnx has it."""

    @nnx.jit
    @amp(policy=policy)
    def train_step(model, optimizer, images, labels):
        loss, grads = nnx.value_and_grad(loss_fn)(model, images, labels)
        optimizer.update(model, grads)
        return loss

    return train_step


@nnx.jit
def accuracy(model, images, labels):
    """The part of the pictures that is classified rightly, in float32."""
    return jnp.mean(model(images).argmax(-1) == labels)


def load(seed):
    """Scikit-learn's digits: training pictures and labels, then those held out."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
    split = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=seed)
    train_images, test_images, train_labels, test_labels = split
    return train_images, train_labels, test_images, test_labels


def make(seed):
    """Model and optimizer, before training."""
    model = Net(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.adamw(3e-3, weight_decay=1e-3), wrt=nnx.Param)


def save(path, *trained):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(path).absolute(), nnx.to_pure_dict(nnx.state(trained)))


def restore(path, *trained):
    """Give the objects the state that is in the checkpoint."""
    state = nnx.state(trained)
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(Path(path).absolute(), nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, saved)
    nnx.update(trained, state)


def train(policy, epochs, seed=0, checkpoint=None):
    """Train under `policy`, from scratch or from a checkpoint of either precision.

    Returns model and optimizer, the losses, and the accuracy on held-out pictures.
    """
    images, labels, *held_out = load(seed)
    model, optimizer = make(seed)
    if checkpoint is not None:
        restore(checkpoint, model, optimizer)
    train_step = make_train_step(policy)
    rng = np.random.default_rng(seed)
    losses = []
    model.train()
    for _ in range(epochs):
        order = rng.permutation(len(labels))
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            batch = order[start : start + BATCH_SIZE]
            losses.append(float(train_step(model, optimizer, images[batch], labels[batch])))
    model.eval()
    return (model, optimizer), losses, float(accuracy(model, *held_out))


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
