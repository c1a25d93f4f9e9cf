"""Train one network on handwritten digits in three precisions and compare what comes out.

    make demo

The model, the loss and the update below are ordinary float32 code. The only line about
precision is ``@amp(policy=policy)`` on the train step. Every run starts from the same weights
and sees the same batches, so that a difference between the curves is a difference of precision.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from jaxamp import amp, report
from jaxamp.inspect.report import Report

matplotlib.use("Agg")
import matplotlib.pyplot as plt

POLICIES = ("always_f32", "mixed_bf16", "mixed_f16")
BATCH_SIZE = 64
NEXT = """
[bold]Next[/bold]
  the one line about precision in this program: examples/digits.py, @amp(policy=policy)
  what runs in which precision in it, and why:
    .venv/bin/python -m jaxamp report examples/block.py:loss --args examples/block.py:inputs --grad
    .venv/bin/python -m jaxamp explain examples/block.py:loss --args examples/block.py:inputs --grad
  your own function: the same commands with your_file.py:function --args 'f32[8,16]' 'f32[16,4]'
  a tutorial: docs/tutorial/train.md; in float16, FP8, from torch.amp: docs/how-to/"""

# --- The model: a small vision transformer in float32 ------------------------------------------


class Attention(eqx.Module):
    """Self-attention over a sequence of tokens."""

    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, *, key: PRNGKeyArray):
        qkv_key, out_key = jax.random.split(key)
        self.qkv = eqx.nn.Linear(width, 3 * width, key=qkv_key)
        self.out = eqx.nn.Linear(width, width, key=out_key)
        self.heads = heads

    def __call__(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens width"]:
        qkv = jax.vmap(self.qkv)(x).reshape(len(x), 3, self.heads, -1)
        query, key, value = jnp.moveaxis(qkv, 1, 0)
        mixed = jax.nn.dot_product_attention(query, key, value)
        return jax.vmap(self.out)(mixed.reshape(x.shape))


class Block(eqx.Module):
    """Attention, then a two-layer network, each normalised first and added to its input."""

    norm1: eqx.nn.LayerNorm
    attention: Attention
    norm2: eqx.nn.LayerNorm
    grow: eqx.nn.Linear
    shrink: eqx.nn.Linear

    def __init__(self, width: int, heads: int, *, key: PRNGKeyArray):
        attention_key, grow_key, shrink_key = jax.random.split(key, 3)
        self.norm1 = eqx.nn.LayerNorm(width)
        self.attention = Attention(width, heads, key=attention_key)
        self.norm2 = eqx.nn.LayerNorm(width)
        self.grow = eqx.nn.Linear(width, 4 * width, key=grow_key)
        self.shrink = eqx.nn.Linear(4 * width, width, key=shrink_key)

    def __call__(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens width"]:
        x = x + self.attention(jax.vmap(self.norm1)(x))
        hidden = jax.nn.gelu(jax.vmap(self.grow)(jax.vmap(self.norm2)(x)))
        return x + jax.vmap(self.shrink)(hidden)


class DigitClassifier(eqx.Module):
    """An 8x8 picture becomes 16 tokens of 2x2 pixels; their mean is classified."""

    embed: eqx.nn.Linear
    position: Float[Array, "16 width"]
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 2, *, key: PRNGKeyArray):
        embed_key, position_key, head_key, *block_keys = jax.random.split(key, 3 + depth)
        self.embed = eqx.nn.Linear(4, width, key=embed_key)
        self.position = 0.02 * jax.random.normal(position_key, (16, width))
        self.blocks = [Block(width, heads, key=block_key) for block_key in block_keys]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, 10, key=head_key)

    def __call__(self, image: Float[Array, "8 8"]) -> Float[Array, "10"]:
        patches = image.reshape(4, 2, 4, 2).swapaxes(1, 2).reshape(16, 4)
        x = jax.vmap(self.embed)(patches) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(jax.vmap(self.norm)(x).mean(axis=0))


Images = Float[Array, "batch 8 8"]
Labels = Int[Array, "batch"]


def loss_fn(model: DigitClassifier, images: Images, labels: Labels) -> Float[Array, ""]:
    """The mean cross-entropy of a batch."""
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def predict(model: DigitClassifier, images: Images) -> Labels:
    """The most likely digit for every picture."""
    return jnp.argmax(jax.vmap(model)(images), axis=-1)


# --- Training: the one place where precision is mentioned --------------------------------------


def make_train_step(optimizer: optax.GradientTransformation, policy: str) -> Callable:
    """One step of training, forward pass, gradient and update together, under `policy`."""

    @amp(policy=policy)
    def train_step(model, opt_state, images, labels):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, images, labels)
        updates, opt_state = optimizer.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, loss

    return train_step


@dataclass(frozen=True)
class Digits:
    """Scikit-learn's handwritten digits, scaled to [0, 1], a fifth of them held out."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    @classmethod
    def load(cls, seed: int) -> "Digits":
        """Read the data, which comes with scikit-learn, and split it evenly by digit."""
        images, labels = load_digits(return_X_y=True)
        images = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
        train_images, test_images, train_labels, test_labels = train_test_split(
            images, labels.astype(np.int32), test_size=0.2, stratify=labels, random_state=seed
        )
        parts = (train_images, train_labels, test_images, test_labels)
        return cls(*map(np.asarray, parts))

    def batches(self, epochs: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The same sequence of shuffled batches for the same seed."""
        rng = np.random.default_rng(seed)
        for _ in range(epochs):
            order = rng.permutation(len(self.train_labels))
            for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
                batch = order[start : start + BATCH_SIZE]
                yield self.train_images[batch], self.train_labels[batch]

    def steps(self, epochs: int) -> int:
        """How many batches `batches` gives."""
        return epochs * (len(self.train_labels) // BATCH_SIZE)


@dataclass(frozen=True)
class Run:
    """What came out of training under one policy."""

    policy: str
    losses: np.ndarray
    accuracy: float
    report: Report


def make_optimizer(steps: int) -> optax.GradientTransformation:
    """AdamW on clipped gradients, with a short warm-up and a cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, steps // 10, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.05))


def train(
    policy: str, digits: Digits, epochs: int, seed: int, on_step: Callable[[float], None]
) -> Run:
    """Train from the seed's weights on the seed's batches, in the precision of `policy`."""
    model = DigitClassifier(key=jax.random.key(seed))
    optimizer = make_optimizer(digits.steps(epochs))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    train_step = make_train_step(optimizer, policy)
    images, labels = next(digits.batches(epochs, seed))
    found = report(train_step)(model, opt_state, images, labels)

    losses = []
    compiled_step = jax.jit(train_step, donate_argnums=(0, 1))
    for images, labels in digits.batches(epochs, seed):
        model, opt_state, loss = compiled_step(model, opt_state, images, labels)
        losses.append(float(loss))
        on_step(losses[-1])

    predicted = jax.jit(amp(predict, policy))(model, jnp.asarray(digits.test_images))
    accuracy = float(np.mean(predicted == digits.test_labels))
    return Run(policy, np.array(losses), accuracy, found)


def train_all(digits: Digits, epochs: int, seed: int, console: Console) -> list[Run]:
    """Train once under every policy, showing progress."""
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
    )
    runs = []
    with Progress(*columns, console=console) as progress:
        for policy in POLICIES:
            task = progress.add_task(policy, total=digits.steps(epochs), loss=float("nan"))

            def on_step(loss: float, task=task) -> None:
                progress.update(task, advance=1, loss=loss)

            runs.append(train(policy, digits, epochs, seed, on_step))
    return runs


# --- What to look at afterwards ----------------------------------------------------------------


def results_table(runs: Sequence[Run], held_out: int) -> Table:
    """Accuracy and loss of every run, and how far its loss curve is from float32."""
    table = Table(title=f"Handwritten digits: same weights, same batches, {held_out} held out")
    table.add_column("policy")
    table.add_column("test accuracy", justify="right")
    table.add_column("final loss", justify="right")
    table.add_column("largest difference to float32", justify="right")
    for run in runs:
        difference = np.abs(run.losses - runs[0].losses).max()
        numbers = f"{run.losses[-1]:.4f}", f"{difference:.4f}"
        table.add_row(run.policy, f"{run.accuracy:.1%}", *numbers)
    return table


def plot_losses(runs: Sequence[Run], path: Path) -> None:
    """Draw the loss curves, and below them their distance from float32."""
    figure, (curves, distance) = plt.subplots(2, sharex=True, figsize=(8, 7), height_ratios=(2, 1))
    widths = (3.0, 1.8, 0.8)  # wide below narrow: equal curves stay visible
    for index, (run, width) in enumerate(zip(runs, widths, strict=True)):
        curves.plot(run.losses, label=run.policy, linewidth=width, color=f"C{index}")
        if index > 0:
            difference = np.abs(run.losses - runs[0].losses)
            distance.plot(difference, linewidth=0.9, color=f"C{index}")
    curves.set(yscale="log", ylabel="training loss", title="Digits: one network, three precisions")
    curves.legend()
    distance.set(ylabel="|loss − loss in f32|", xlabel="step")
    for axes in (curves, distance):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> list[Run]:
    """Train, compare, explain, draw."""
    parser = argparse.ArgumentParser(description="Handwritten digits in three precisions.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, default=Path("out/digits_loss.png"))
    parser.add_argument("--quick", action="store_true", help="one epoch, to see that it runs")
    options = parser.parse_args(argv)

    console = Console()
    digits = Digits.load(options.seed)
    runs = train_all(digits, 1 if options.quick else options.epochs, options.seed, console)
    console.print(results_table(runs, len(digits.test_labels)))
    plot_losses(runs, options.picture)
    console.print(f"Loss curves: {options.picture} (JAX {jax.__version__}, {jax.devices()[0]})")
    console.print("\n".join(str(runs[1].report).splitlines()[:4]), highlight=False, soft_wrap=True)
    console.print(NEXT, highlight=False, soft_wrap=True)
    return runs


if __name__ == "__main__":
    main()
