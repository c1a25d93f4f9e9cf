"""What `probe` costs and finds: `python -m benchmarks.probe [cost|search|faults|mended]`.

`cost` compares one probed train step with the float32 step: time, the best of several runs taken
in turns, and memory, as the compiler plans it. `search` takes the time of the search for a first
infinity, beside that of compiling the step, and of all of `debug_step`. `faults` looks for every
planted fault, and `mended` asks `debug_step` about those that make an infinity or NaN, and runs its
rules.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxamp import amp, plan_of
from jaxamp.inspect.blocks import blocks_of
from jaxamp.numerics.shadow import run_beside
from jaxamp.training import debug_step, explain_nonfinite

WIDTH, LAYERS, BATCH, LENGTH = 256, 2, 8, 128
ROUNDS = 5


def block(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Attention of four heads and two linear layers, each behind a norm."""
    batch, length, width = x.shape
    q, k, v = jnp.split((normed(x) @ params["qkv"]).reshape(batch, length, 4, -1), 3, -1)
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, width)
    x = x + mixed @ params["out"]
    return x + jax.nn.gelu(normed(x) @ params["up"]) @ params["down"]


def normed(x: jax.Array) -> jax.Array:
    """Layer normalization without parameters."""
    mean = jnp.mean(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)


def step(params: Any, x: jax.Array) -> Any:
    """One step of gradient descent."""

    def loss_fn(params: Any) -> jax.Array:
        hidden = x
        for index, layer in enumerate(params):
            with jax.named_scope(f"layer{index}"):
                hidden = block(layer, hidden)
        return jnp.mean(hidden**2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 1e-2 * g, params, grads), loss


def arguments(layers: int = LAYERS) -> tuple[Any, jax.Array]:
    """Parameters and inputs."""
    shapes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
    keys = iter(jax.random.split(jax.random.key(0), layers * len(shapes) + 1))
    params = [
        {
            name: jax.random.normal(next(keys), (a * WIDTH, b * WIDTH)) / (a * WIDTH) ** 0.5
            for name, (a, b) in shapes.items()
        }
        for _ in range(layers)
    ]
    return params, jax.random.normal(next(keys), (BATCH, LENGTH, WIDTH))


def cost() -> int:
    """Time and memory of a probed step, relative to the float32 step."""
    args = arguments()
    table = Table(title=f"{LAYERS} blocks of width {WIDTH}, {BATCH * LENGTH} tokens")
    for heading in ("policy", "operations", "step ms", "probed ms", "ratio", "MiB", "probed", ""):
        table.add_column(heading, justify="right")
    plain = jax.jit(lambda *a: jax.tree.leaves(step(*_tree(a, args)))).lower(*_flat(args)).compile()
    for policy in ("auto_mixed_bf16", "auto_mixed"):
        plan = plan_of(step, policy)(*args)
        operations = list(blocks_of(plan).walk())
        probed = jax.jit(functools.partial(run_beside, plan)).lower(*_flat(args)).compile()
        times = _in_turns([plain, probed], _flat(args))
        memory = [_memory(compiled) / 2**20 for compiled in (plain, probed)]
        table.add_row(
            policy, str(len(operations)), *(f"{1e3 * t:.0f}" for t in times),
            f"{times[1] / times[0]:.2f}", *(f"{m:.0f}" for m in memory),
            f"{memory[1] / memory[0]:.2f}",
        )  # fmt: skip
    Console().print(table)
    return 0


def search() -> int:
    """Time to search for a first infinity, and to find and mend a weight that is too large."""
    table = Table(title=f"blocks of width {WIDTH}, {BATCH * LENGTH} tokens, auto_mixed")
    for heading in ("blocks", "operations", "step s", "search s", "debug_step s", "its runs"):
        table.add_column(heading, justify="right")
    mixed = amp(step, "auto_mixed")
    calls = jax.jit(mixed).lower, explain_nonfinite(mixed), debug_step(mixed)
    for layers in (1, 2, 4, 8):
        jax.clear_caches()
        params, x = arguments(layers)
        params[-1]["down"] *= 1e6
        plan = plan_of(step, "auto_mixed")(params, x)
        times: list[float] = []
        found: Any = None
        for call in calls:
            start = time.perf_counter()
            found = call(params, x)
            if call is calls[0]:
                found.compile()
            times.append(time.perf_counter() - start)
        count = len(list(plan.decisions()))
        table.add_row(str(layers), str(count), *(f"{s:.1f}" for s in times), str(found.runs))
    Console().print(table)
    return 0


def faults() -> int:
    """Looks for every planted fault."""
    from tests.inspect.planted import FAULTS
    from tests.numerics.test_probe import wrong

    return _listed({fault.name: wrong(fault) for fault in track(FAULTS, "faults")}, "found")


def mended() -> int:
    """Asks `debug_step` about every planted fault that makes an infinity or NaN."""
    from tests.inspect.planted import FAULTS
    from tests.training.test_debug import mended as wrong

    loud = [fault for fault in FAULTS if fault.kind != "underflow"]
    return _listed({fault.name: wrong(fault) for fault in track(loud, "faults")}, "mended")


def _listed(answers: dict[str, str], right: str) -> int:
    """Prints what is wrong with each answer; the number of failures, at most 1."""
    for name, answer in answers.items():
        print(f"{name:44} {answer or right}")
    good = sum(not answer for answer in answers.values())
    print(f"{good} of {len(answers)} {right}")
    return int(good < len(answers))


def _flat(args: Any) -> list[Any]:
    return jax.tree.leaves(args)


def _tree(flat: Any, args: Any) -> Any:
    return jax.tree.unflatten(jax.tree.structure(args), flat)


def _in_turns(functions: list[Callable[..., Any]], args: list[Any]) -> list[float]:
    """The best time of each function, in seconds."""
    best = [float("inf")] * len(functions)
    for _ in range(ROUNDS):
        for index, function in enumerate(functions):
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def _memory(compiled: Any) -> int:
    """Bytes of arguments, results and what lies between."""
    planned = compiled.memory_analysis()
    return (
        planned.argument_size_in_bytes
        + planned.output_size_in_bytes
        + planned.temp_size_in_bytes
        - planned.alias_size_in_bytes
    )


def main() -> int:
    """Measures what was asked for."""
    modes = {"cost": cost, "search": search, "faults": faults, "mended": mended}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.probe", description=__doc__)
    parser.add_argument("mode", nargs="?", choices=modes, default="cost")
    return modes[parser.parse_args().mode]()


if __name__ == "__main__":
    sys.exit(main())
