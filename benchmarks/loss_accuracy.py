"""Measure how accurate a loss in chunks is, against float64 and beside a hand and logits stored.

    python -m benchmarks.loss_accuracy                  errors, by words and by spread of the logits
    python -m benchmarks.loss_accuracy --steps 200      and a model's loss on real text

Errors are those of the loss and of the gradients of activations and of the matrix, relative, by
norm. The hand multiplies in bfloat16 and computes the softmax in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import jaxamp
from benchmarks.deviceless.models.unseen.many_words import LLAMA
from benchmarks.real_text import sequences

TOKENS, WIDTH = 64, 64
WORDS, SPREADS = (512, 8192, 65536, 262144), (1.0, 10.0, 30.0)
CHUNKS = jaxamp.PrecisionPolicy.MIXED_BF16.replace(loss_in_chunks=True)
STORED = CHUNKS.replace(loss_in_chunks=False)
BATCH, LENGTH, BYTES, RATE = 4, 33, 256, 3e-3


def loss(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()


def by_hand(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    logits = (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _slopes(fn: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(fn, (0, 1))


WAYS = {
    "by hand": _slopes(by_hand),
    "logits stored": jaxamp.amp(_slopes(loss), STORED),
    "amp(grad(f)), in chunks": jaxamp.amp(_slopes(loss), CHUNKS),
    "grad(amp(f)), in chunks": _slopes(jaxamp.amp(loss, CHUNKS)),
}


def operands(words: int, spread: float) -> tuple[np.ndarray, ...]:
    """Draw activations and a matrix whose products have a standard deviation, and labels."""
    rng = np.random.default_rng(0)
    x = spread * rng.standard_normal((TOKENS, WIDTH), np.float32)
    w = rng.standard_normal((WIDTH, words), np.float32) / WIDTH**0.5
    return x, w, rng.integers(0, words, TOKENS).astype(np.int32)


def errors(words: int, spread: float, ways: Sequence[str] = tuple(WAYS)) -> dict[str, list[float]]:
    """Return the relative errors of loss and gradients of each way."""
    args = operands(words, spread)
    with jax.enable_x64(True):
        wide = [a.astype(np.float64) if a.dtype == np.float32 else a for a in args]
        exact = [np.asarray(a) for a in jax.tree.leaves(jax.jit(_slopes(loss))(*wide))]
    found: dict[str, list[float]] = {}
    for way in ways:
        got = jax.tree.leaves(jax.jit(WAYS[way])(*args))
        pairs = zip(got, exact, strict=True)
        found[way] = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]
    return found


def curve(wrap: Callable[[Callable[..., Any]], Callable[..., Any]], steps: int) -> np.ndarray:
    """Train a small Llama-like model on real text, byte by byte; return the loss of each step."""
    optimizer = optax.adam(RATE)
    params = LLAMA.small.init(jax.random.key(0))

    @jax.jit
    def train(state: Any, key: jax.Array) -> Any:
        params, moments = state
        batch = sequences(key, BATCH, LENGTH, BYTES)
        value, slopes = wrap(jax.value_and_grad(lambda p: LLAMA.small.plain(p, batch)[0]))(params)
        updates, moments = optimizer.update(slopes, moments)
        return (optax.apply_updates(params, updates), moments), value

    state, values = (params, optimizer.init(params)), []
    for key in jax.random.split(jax.random.key(1), steps):
        state, value = train(state, key)
        values.append(float(value))
    return np.array(values)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loss_accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=0)
    options = parser.parse_args()
    shown = Table("words", "spread", *WAYS, title="errors of loss / dx / dw, in thousandths")
    for words in WORDS:
        for spread in SPREADS:
            rows = errors(words, spread).values()
            cells = (" / ".join(f"{1e3 * error:.3f}" for error in row) for row in rows)
            shown.add_row(str(words), str(spread), *cells)
    Console(width=140).print(shown)
    if options.steps:
        stored, chunks = (
            curve(lambda f, policy=policy: jaxamp.amp(f, policy), options.steps)
            for policy in (STORED, CHUNKS)
        )
        wide = curve(lambda f: f, options.steps)
        for name, other in (("logits stored", stored), ("float32", wide)):
            print(f"in chunks against {name}: {np.max(np.abs(chunks - other)):.4f} at most")
        print("last 20 steps, mean:", *(f"{c[-20:].mean():.4f}" for c in (chunks, stored, wide)))


if __name__ == "__main__":
    main()
