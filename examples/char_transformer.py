"""Train a character-level transformer on Python's own help texts, in float32 and in bfloat16.

    python examples/char_transformer.py
    python examples/char_transformer.py --steps 2000

The layers are stacked and run by `jax.lax.scan`, each recomputed in the backward pass
(`jax.checkpoint`), as a deep network would be. The train step is decorated with ``@amp``;
nothing below it knows about precision.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from jaxamp import PrecisionPolicy, amp

POLICIES = ("always_f32", "mixed_bf16")
SEED = 0

# --- The text ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """A text as character codes, and the alphabet that the codes index."""

    alphabet: str
    codes: np.ndarray

    @classmethod
    def load(cls) -> "Corpus":
        """The help topics that come with Python, one after the other."""
        text = "\n".join(topics[name] for name in sorted(topics))
        alphabet = "".join(sorted(set(text)))
        return cls(alphabet, np.array([alphabet.index(c) for c in text], np.int32))

    def batches(self, steps: int, size: int, length: int, seed: int = SEED) -> Iterator[np.ndarray]:
        """Random windows of `length + 1` characters, the same for every call with one seed."""
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            starts = rng.integers(0, len(self.codes) - length - 1, size)
            yield self.codes[starts[:, None] + np.arange(length + 1)]

    def decode(self, codes: np.ndarray) -> str:
        """The text behind the codes."""
        return "".join(self.alphabet[code] for code in codes)


# --- The model: a decoder-only transformer in float32 ------------------------------------------


class Layer(eqx.Module):
    """Causal attention and a feed-forward network, each added to the residual stream."""

    norm1: eqx.nn.RMSNorm
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    norm2: eqx.nn.RMSNorm
    grow: eqx.nn.Linear
    shrink: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        self.norm1 = eqx.nn.RMSNorm(width)
        self.qkv = eqx.nn.Linear(width, 3 * width, use_bias=False, key=keys[0])
        self.out = eqx.nn.Linear(width, width, use_bias=False, key=keys[1])
        self.norm2 = eqx.nn.RMSNorm(width)
        self.grow = eqx.nn.Linear(width, 4 * width, use_bias=False, key=keys[2])
        self.shrink = eqx.nn.Linear(4 * width, width, use_bias=False, key=keys[3])
        self.heads = heads

    def attend(self, x: Float[Array, "time width"]) -> Float[Array, "time width"]:
        """Every position looks at itself and at those before it."""
        qkv = jax.vmap(self.qkv)(x).reshape(len(x), 3, self.heads, -1)
        query, key, value = jnp.moveaxis(qkv, 1, 0)
        rotate = jax.vmap(eqx.nn.RotaryPositionalEmbedding(query.shape[-1]), in_axes=1, out_axes=1)
        mixed = jax.nn.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return jax.vmap(self.out)(mixed.reshape(x.shape))

    def __call__(self, x: Float[Array, "time width"]) -> Float[Array, "time width"]:
        x = x + self.attend(jax.vmap(self.norm1)(x))
        hidden = jax.nn.silu(jax.vmap(self.grow)(jax.vmap(self.norm2)(x)))
        return x + jax.vmap(self.shrink)(hidden)


class Transformer(eqx.Module):
    """Characters in, logits of the next character out; all layers in one stacked `Layer`."""

    embedding: eqx.nn.Embedding
    layers: Layer
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, alphabet: int, width: int, heads: int, depth: int, *, key: PRNGKeyArray):
        embedding_key, layers_key, head_key = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(
            weight=0.1 * jax.random.normal(embedding_key, (alphabet, width))
        )
        layer_keys = jax.random.split(layers_key, depth)
        self.layers = eqx.filter_vmap(lambda key: Layer(width, heads, key=key))(layer_keys)
        self.norm = eqx.nn.RMSNorm(width)
        self.head = eqx.nn.Linear(width, alphabet, use_bias=False, key=head_key)

    def __call__(self, codes: Int[Array, "time"]) -> Float[Array, "time alphabet"]:
        x = jax.vmap(self.embedding)(codes)

        @jax.checkpoint
        def apply(x: Float[Array, "time width"], layer: Layer):
            return layer(x), None

        x, _ = jax.lax.scan(apply, x, self.layers)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def loss_fn(model: Transformer, batch: Int[Array, "batch time"]) -> Float[Array, ""]:
    """The mean cross-entropy of the next character, in nats."""
    logits = jax.vmap(model)(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def accuracy(model: Transformer, batch: Int[Array, "batch time"]) -> Float[Array, ""]:
    """Which part of the next characters is the one that the model finds most likely."""
    logits = jax.vmap(model)(batch[:, :-1])
    return jnp.mean(jnp.argmax(logits, axis=-1) == batch[:, 1:])


# --- Training and sampling ---------------------------------------------------------------------


def make_train_step(
    optimizer: optax.GradientTransformation, policy: str | PrecisionPolicy
) -> Callable:
    """One step of training, forward pass, gradient and update together, under `policy`."""

    @amp(policy=policy)
    def train_step(model, opt_state, batch):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, loss

    return train_step


def continue_text(
    model: Transformer, prompt: Int[Array, "time"], keys: PRNGKeyArray
) -> Int[Array, "characters"]:
    """Draw one character for each key from what the model predicts after `prompt`."""

    def step(window, key):
        logits = model(window)[-1]
        drawn = jax.random.categorical(key, logits / 0.7)  # a little cooler than the model
        return jnp.append(window[1:], drawn), drawn

    _, drawn = jax.lax.scan(step, prompt, keys)
    return drawn


@dataclass(frozen=True)
class Size:
    """How large the network, its batches and the sample are."""

    steps: int
    batch: int = 16
    length: int = 64
    width: int = 128
    heads: int = 4
    depth: int = 4
    sample: int = 300


QUICK = Size(steps=3, batch=2, length=16, width=16, heads=2, depth=2, sample=8)


@dataclass(frozen=True)
class Run:
    """What came out of training under one policy."""

    policy: str
    losses: np.ndarray
    accuracy: float
    text: str


def train(
    policy: str, corpus: Corpus, size: Size, on_step: Callable[[float], None], seed: int = SEED
) -> Run:
    """Train the same network on the same batches in the precision of `policy`, and let it write."""
    key = jax.random.key(seed)
    model = Transformer(len(corpus.alphabet), size.width, size.heads, size.depth, key=key)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, size.steps // 10, size.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    train_step = jax.jit(make_train_step(optimizer, policy), donate_argnums=(0, 1))

    losses = []
    for batch in corpus.batches(size.steps, size.batch, size.length, seed):
        model, opt_state, loss = train_step(model, opt_state, batch)
        losses.append(float(loss))
        on_step(losses[-1])

    keys = jax.random.split(key, size.sample)
    prompt = jnp.asarray(corpus.codes[: size.length])
    codes = jax.jit(amp(continue_text, policy))(model, prompt, keys)
    (others,) = corpus.batches(1, 4 * size.batch, size.length, seed=SEED + 12345)
    right = jax.jit(amp(accuracy, policy))(model, others)
    return Run(policy, np.array(losses), float(right), corpus.decode(np.asarray(codes)))


def results_table(runs: Sequence[Run]) -> Table:
    """The loss of every run along the way, and how far each is from float32."""
    table = Table(title="Mean loss of the last tenth of the steps (nats per character)")
    table.add_column("policy")
    table.add_column("first loss", justify="right")
    table.add_column("final loss", justify="right")
    table.add_column("largest difference to f32", justify="right")
    table.add_column("next character right", justify="right")
    for run in runs:
        tail = max(1, len(run.losses) // 10)
        difference = np.abs(run.losses - runs[0].losses).max()
        table.add_row(
            run.policy,
            f"{run.losses[0]:.4f}",
            f"{run.losses[-tail:].mean():.4f}",
            f"{difference:.4f}",
            f"{run.accuracy:.1%}",
        )
    return table


def main(argv: Sequence[str] | None = None) -> list[Run]:
    """Train under every policy, compare the losses, print what each network writes."""
    parser = argparse.ArgumentParser(description="Character-level transformer in f32 and bf16.")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--quick", action="store_true", help="a tiny network for three steps")
    options = parser.parse_args(argv)
    size = QUICK if options.quick else Size(steps=options.steps)

    console = Console()
    corpus = Corpus.load()
    console.print(f"{len(corpus.codes):,} characters, an alphabet of {len(corpus.alphabet)}")
    runs = []
    with Progress(console=console) as progress:
        for policy in POLICIES:
            task = progress.add_task(policy, total=size.steps)

            def on_step(loss: float, task=task, policy=policy) -> None:
                progress.update(task, advance=1, description=f"{policy} loss {loss:.3f}")

            runs.append(train(policy, corpus, size, on_step))
    console.print(results_table(runs))
    for run in runs:
        console.rule(run.policy)
        console.print(Text(run.text))
    return runs


if __name__ == "__main__":
    main()
