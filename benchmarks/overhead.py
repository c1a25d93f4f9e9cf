"""What `amp` adds to a call that is compiled already.

    python -m benchmarks.overhead

A second call finds its compiled form by the structure of its arguments: its time is compared with
that of `jax.jit`, for small layers, whose computation hides nothing. Both sides are measured
alternately, on the machine at hand.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks.trace_cost import fresh
from jaxamp import amp

Function = Callable[..., Any]

LAYERS = (1, 16, 128)
CALLS = 300


def network(params: list[jax.Array], x: jax.Array) -> jax.Array:
    """A product and an activation for each parameter."""
    for weight in params:
        x = jnp.tanh(x @ weight)
    return x


def seconds_to_call(fn: Function, args: tuple[Any, ...]) -> float:
    """Time of one call of many, the results waited for at the end."""
    start = time.perf_counter()
    results = [fn(*args) for _ in range(CALLS)]
    jax.block_until_ready(results[-1])
    return (time.perf_counter() - start) / CALLS


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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="What amp adds to calls.")
    parser.add_argument("--repeat", type=int, default=5, help="eighths of the rounds (default 5)")
    options = parser.parse_args(argv)
    table = Table(title=f"Calls, JAX {jax.__version__}, {jax.devices()[0].platform}")
    table.add_column("what, beside what")
    for heading in ("without amp", "with amp", "ratio"):
        table.add_column(heading, justify="right")
    measure_calls(table, options.repeat)
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
