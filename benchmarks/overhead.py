"""What `amp` adds to a call that is compiled already, and to compiling.

    python -m benchmarks.overhead

A second call finds its compiled form by the structure of its arguments: its time is compared with
that of `jax.jit`, for small layers, whose computation hides nothing. Compile times are those of the
value and gradient of the transformer of `trace_cost`, against bfloat16 by hand. Both sides are
measured alternately; ratios are of medians, on the machine at hand.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks.trace_cost import fresh, transformer_arguments, transformer_loss
from jaxamp import amp

Function = Callable[..., Any]

LAYERS = (1, 16, 128)
CALLS = 300


def network(params: list[jax.Array], x: jax.Array) -> jax.Array:
    """A product and an activation for each parameter."""
    for weight in params:
        x = jnp.tanh(x @ weight)
    return x


def by_hand(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The transformer with parameters and activations in bfloat16."""
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return transformer_loss(low, x.astype(jnp.bfloat16), y).astype(jnp.float32)


def seconds_to_call(fn: Function, args: tuple[Any, ...]) -> float:
    """Time of one call of many, the results waited for at the end."""
    start = time.perf_counter()
    results = [fn(*args) for _ in range(CALLS)]
    jax.block_until_ready(results[-1])
    return (time.perf_counter() - start) / CALLS


def seconds_to_compile(fn: Function, args: tuple[Any, ...]) -> float:
    """Time in which XLA compiles a program that has been traced and lowered."""
    lowered = jax.jit(fn).lower(*args)
    start = time.perf_counter()
    lowered.compile()
    return time.perf_counter() - start


def medians(one: Callable[[], float], other: Callable[[], float], repeat: int) -> list[float]:
    """Median times of the two, measured alternately after one round of warming up."""
    rounds = [(one(), other()) for _ in range(repeat + 1)][1:]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def measure_calls(table: Table, repeat: int) -> None:
    """Adds two rows for each number of parameters: beside plain float32, and the same program.

    Of each the least time is taken: what a call costs when nothing else runs.
    """
    for layers in LAYERS:
        args = [jnp.ones((8, 8))] * layers, jnp.ones((2, 8))
        functions = [jax.jit(fresh(network)), amp(fresh(network)), jax.jit(amp(fresh(network)))]
        rounds = [[seconds_to_call(fn, args) for fn in functions] for _ in range(8 * repeat)]
        plain, mixed, compiled = map(min, zip(*rounds, strict=True))
        for name, before in (("jax.jit(f)", plain), ("jax.jit(amp(f))", compiled)):
            cells = f"{before * 1e6:.1f} µs", f"{mixed * 1e6:.1f} µs", f"{mixed / before:.2f}"
            table.add_row(f"second call, {layers} parameters: {name}", *cells)


def measure_compiling(table: Table, repeat: int) -> None:
    """Adds a row for the transformer."""
    args = transformer_arguments()
    grad = jax.value_and_grad
    before, after = medians(
        lambda: seconds_to_compile(grad(fresh(by_hand)), args),
        lambda: seconds_to_compile(grad(amp(fresh(transformer_loss))), args),
        repeat,
    )
    cells = f"{before:.2f} s", f"{after:.2f} s", f"{after / before:.2f}"
    table.add_row("compiling grad(amp(f)): bfloat16 by hand", *cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="What amp adds to calls and to compiling.")
    parser.add_argument("--repeat", type=int, default=5, help="rounds after the first (default 5)")
    options = parser.parse_args(argv)
    table = Table(title=f"Calls and compiling, JAX {jax.__version__}, {jax.devices()[0].platform}")
    table.add_column("what, beside what")
    for heading in ("without amp", "with amp", "ratio"):
        table.add_column(heading, justify="right")
    measure_calls(table, options.repeat)
    measure_compiling(table, options.repeat)
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
