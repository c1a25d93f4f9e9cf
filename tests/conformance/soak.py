"""Long runs of calls: memory stays flat however often shapes, functions and constants change."""

from __future__ import annotations

import collections
import gc
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from jaxamp import amp
from tests.conformance.jobs import Job

MIB = 2**20
SHAPES = 10  # different ones in turn: each call has another shape than the one before
ROUNDS = 5  # a leak grows in each; what an allocator takes at once, for later, in one or two
SLACK = 8 * MIB  # over all rounds


def _layer(x: Any, w: Any) -> Any:
    return jax.nn.softmax(jnp.tanh(x @ w))


def _changing_shapes(index: int) -> None:
    """One function, a shape that changes at every call."""
    size = 1 + index % SHAPES
    x, w = np.ones((size, 3), np.float32), np.ones((3, 2), np.float32)
    assert amp(_layer)(x, w).shape == (size, 2)


def _fresh_functions(index: int) -> None:
    """A function that is made, used and dropped at every call, and caches that are emptied."""
    x = np.ones((2, 3), np.float32)
    scale = jnp.float32(index)
    assert amp(lambda x: jnp.tanh(x @ x.T) * scale)(x).shape == (2, 2)
    if index % 50 == 49:
        jax.clear_caches()


def _changing_numbers(index: int) -> None:
    """Python floats are traced; numbers of numpy and JAX too."""
    rates = (0.1 * index, np.float32(index), jnp.float32(index))
    for rate in rates:
        _step(np.ones((2, 2), np.float32), rate)


@amp
def _step(x: Any, rate: Any) -> Any:
    return x - rate * (x @ x)


RUNS: dict[str, Callable[[int], None]] = {
    "changing-shapes": _changing_shapes,
    "changing-numbers": _changing_numbers,
    "fresh-functions": _fresh_functions,
}
CALLS = {"changing-shapes": 10_000, "changing-numbers": 10_000, "fresh-functions": 1_200}


def all_jobs() -> list[Job]:
    """Every run at its full length."""
    return [Job("soak", f"{name}-{calls}") for name, calls in CALLS.items()]


def run(name: str) -> None:
    """Runs what `NAME-CALLS` says: a round that warms up, and `ROUNDS` that are measured.

    Raises:
        AssertionError: if the number of jaxamp's objects grows after the first round, or memory
            does in most of the others.
    """
    kind, _, calls = name.rpartition("-")
    length = int(calls) // (ROUNDS + 1)
    assert length >= SHAPES, "a round sees every shape"
    _play(RUNS[kind], length, 0)
    objects, memory = _objects(), [_resident()]
    for number in range(1, ROUNDS + 1):
        _play(RUNS[kind], length, number)
        memory.append(_resident())
    grown = _objects() - objects
    assert not grown, f"objects that were not let go: {dict(grown)}"
    leaked = ROUNDS * statistics.median(b - a for a, b in itertools.pairwise(memory))
    assert leaked < SLACK, f"{leaked / MIB:.1f} MiB more than before"


def _play(call: Callable[[int], None], length: int, number: int) -> None:
    """One round of calls."""
    for index in range(number * length, (number + 1) * length):
        call(index)


def _objects() -> collections.Counter[str]:
    """How many objects of jaxamp's classes there are."""
    gc.collect()
    return collections.Counter(
        type(x).__qualname__
        for x in gc.get_objects()
        if str(type(x).__module__).startswith("jaxamp")
    )


def _resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss
