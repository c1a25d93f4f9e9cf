"""How far the gradients of each version are from float32's, on weights as drawn and as trained.

Runs on the CPU, at a small size. Every rounding of a version takes place: XLA is told not to keep
more precision than was written. Float32 itself is compared with float64, in a process of its own.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import roundings

os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *roundings.FLAGS]).strip()

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.deviceless.models import EVERY
from benchmarks.deviceless.models.model import Model
from benchmarks.deviceless.variants import PLAIN, variants

STEPS = 300
BATCHES = 12
"""Batches over which an error is averaged."""


def train(model: Model, steps: int = STEPS) -> tuple[Any, Any, float, float]:
    """Train in float32 from a fixed seed.

    Returns:
        The parameters as drawn and as trained, the first loss and the last.
    """
    size = model.small
    optimizer = optax.adam(optax.cosine_decay_schedule(model.learning_rate, steps))
    gradient = variants(size)[PLAIN]

    @jax.jit
    def step(params: Any, state: Any, key: jax.Array) -> Any:
        (loss, _), grads = gradient(params, size.sample(key))
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    drawn = jax.jit(size.init)(jax.random.key(0))
    params, state, losses = drawn, optimizer.init(drawn), []
    keys = jax.random.split(jax.random.key(1), steps)
    for key in track(list(keys), f"{model.name}: training", transient=True):
        params, state, loss = step(params, state, key)
        losses.append(float(loss))
    return drawn, params, losses[0], float(np.mean(losses[-10:]))


def batches(model: Model) -> list[Any]:
    """Data that training did not see."""
    keys = jax.random.split(jax.random.key(2), BATCHES)
    return [jax.jit(model.small.sample)(key) for key in keys]


def gradients(model: Model, variant: str, params: Any, data: Sequence[Any]) -> list[Any]:
    """The gradient on each batch."""
    fn = jax.jit(variants(model.small)[variant])
    return [jax.tree.map(np.asarray, fn(params, batch)[1]) for batch in data]


def error(found: Sequence[Any], exact: Sequence[Any]) -> float:
    """The relative error of the whole gradient in the Euclidean norm, averaged over batches."""
    return float(np.mean([_distance(f, e) for f, e in zip(found, exact, strict=True)]))


def _distance(found: Any, exact: Any) -> float:
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True))
    difference = sum(np.sum((np.float64(f) - np.float64(e)) ** 2) for f, e in pairs)
    return float(np.sqrt(difference / sum(np.sum(np.float64(e) ** 2) for _, e in pairs)))


def exact_gradients(model: Model, params: Any, data: Sequence[Any]) -> list[Any]:
    """The gradients in float64, computed in a process in which JAX has it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "exchange"
        path.write_bytes(pickle.dumps(jax.tree.map(np.asarray, (model.name, params, data))))
        command = [sys.executable, "-m", "benchmarks.deviceless.accuracy", str(path)]
        subprocess.run(command, check=True, env=os.environ | {"JAX_ENABLE_X64": "1"})
        return pickle.loads(path.read_bytes())


def _answer_in_float64(path: Path) -> None:
    name, params, data = pickle.loads(path.read_bytes())

    def widen(tree: Any) -> Any:
        return jax.tree.map(lambda a: jnp.asarray(a, np.float64) if a.dtype == "f4" else a, tree)

    found = gradients(EVERY[str(name)], PLAIN, widen(params), [widen(batch) for batch in data])
    path.write_bytes(pickle.dumps(found))


def measure(model: Model) -> list[dict[str, Any]]:
    """A row for each version: its error on initial and on trained weights."""
    drawn, trained, first, last = train(model)
    data = batches(model)
    rows: dict[str, dict[str, Any]] = {}
    for weights, params in (("initial", drawn), ("trained", trained)):
        reference = gradients(model, PLAIN, params, data)
        exact = exact_gradients(model, params, data)
        shown = f"{model.name}: {weights} weights"
        for variant in track(list(variants(model.small)), shown, transient=True):
            found = reference if variant == PLAIN else gradients(model, variant, params, data)
            row = rows.setdefault(variant, {"model": model.name, "variant": variant})
            against = exact if variant == PLAIN else reference
            row[weights] = error(found, against)
    for row in rows.values():
        row |= {"first loss": first, "last loss": last}
    return list(rows.values())


def report(models: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """Measure the named models, give the rows so far after each, and print a table."""
    shown = Table(
        title="relative error of the gradient: float32 against float64, others against it"
    )
    for heading in ("program", "initial weights", "trained weights"):
        shown.add_column(heading, justify="left" if heading == "program" else "right")
    rows = []
    for name in models:
        found = measure(EVERY[name])
        rows += found
        shown.add_section()
        losses = f"loss {found[0]['first loss']:.2f} → {found[0]['last loss']:.2f}"
        shown.add_row(f"[bold]{name}", "", losses)
        for row in found:
            shown.add_row(row["variant"], f"{row['initial']:.2e}", f"{row['trained']:.2e}")
        yield rows
    Console().print(shown)


if __name__ == "__main__":
    _answer_in_float64(Path(sys.argv[1]))
