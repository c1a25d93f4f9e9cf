"""What `amp` adds to tracing: planning and rewriting, as a ratio to tracing the function alone.

    python -m benchmarks.trace_cost
    python -m benchmarks.trace_cost --max-ratio 2.0     unsuccessful above that ratio
    python -m benchmarks.trace_cost --only models
    python -m benchmarks.trace_cost --only models --fused-attention     as where a kernel is at hand
    python -m benchmarks.trace_cost --no-collector      without Python's garbage collector

Three models are differentiated: a transformer of 24 layers written out, one of 12 scanned over with
`jax.checkpoint`, and ResNet-50 of flax modules. Then come chains of up to 100,000 equations.

Both times of a ratio come from one run, alternately, the medians of several rounds, in seconds of
the processor: whether the garbage collector happens to run is a part of either. Nothing is
compiled. Beside `amp` stands `jax.jit` in its place, as a ratio to the function without either: JAX
differentiates a jitted function more slowly than another. The memory is what Python objects take:
at the peak of planning, beyond the jaxpr, as a ratio to the jaxpr.
"""

import argparse
import functools
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from rich.console import Console
from rich.table import Table

from benchmarks.deviceless.models.resnet import RESNET50
from jaxamp import PrecisionPolicy, amp
from jaxamp.plan import plan_program

Function = Callable[..., Any]

LAYERS, SCANNED, WIDTH, HEADS, TOKENS, BATCH = 24, 12, 64, 4, 16, 2
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
MANY = 30_000  # longer chains than this are measured once
POLICY = PrecisionPolicy.AUTO_MIXED_BF16


def transformer_loss(params: dict[str, Any], x: jax.Array, y: jax.Array) -> jax.Array:
    """A transformer of `LAYERS` layers, written out one after the other."""
    for layer in params["layers"]:
        x = _layer(x, layer)
    return _loss(params, x, y)


def scanned_loss(params: dict[str, Any], x: jax.Array, y: jax.Array) -> jax.Array:
    """A transformer whose layers' parameters are stacked: a scan over them, with checkpoints."""
    step = jax.checkpoint(fresh(_layer))  # or JAX knows its jaxpr from the round before
    x, _ = jax.lax.scan(lambda x, layer: (step(x, layer), None), x, params["layers"])
    return _loss(params, x, y)


def _loss(params: dict[str, Any], x: jax.Array, y: jax.Array) -> jax.Array:
    logits = _norm(x, params["norm"]) @ params["head"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], axis=-1))


def _layer(x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
    x = x + _attention(layer, _norm(x, layer["norm1"]))
    hidden = jax.nn.gelu(_norm(x, layer["norm2"]) @ layer["grow"] + layer["bias"])
    return x + hidden @ layer["shrink"]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-5) * scale


def _attention(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    split = (BATCH, TOKENS, HEADS, WIDTH // HEADS)
    query, key, value = ((x @ layer[name]).reshape(split) for name in ("query", "key", "value"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(WIDTH // HEADS)
    scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores, -1e30)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
    return mixed.reshape(x.shape) @ layer["out"]


def transformer_arguments() -> tuple[dict[str, Any], jax.Array, jax.Array]:
    """Parameters, a batch of inputs and its labels; tracing reads only their shapes."""
    square = jnp.ones((WIDTH, WIDTH))
    layer = {
        **dict.fromkeys(("query", "key", "value", "out"), square),
        "norm1": jnp.ones(WIDTH),
        "norm2": jnp.ones(WIDTH),
        "grow": jnp.ones((WIDTH, 4 * WIDTH)),
        "bias": jnp.ones(4 * WIDTH),
        "shrink": jnp.ones((4 * WIDTH, WIDTH)),
    }
    params = {"layers": [layer] * LAYERS, "norm": jnp.ones(WIDTH), "head": square}
    return params, jnp.ones((BATCH, TOKENS, WIDTH)), jnp.ones((BATCH, TOKENS), jnp.int32)


def scanned_arguments() -> tuple[dict[str, Any], jax.Array, jax.Array]:
    """Those of the scanned transformer."""
    params, x, y = transformer_arguments()
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"][:SCANNED])
    return {**params, "layers": stacked}, x, y


def resnet() -> tuple[Function, tuple[Any, ...]]:
    """ResNet-50 with few channels: as many equations as the full one."""
    small = RESNET50.small
    keys = jax.random.split(jax.random.key(0))
    shapes = jax.eval_shape(small.init, keys[0]), jax.eval_shape(small.sample, keys[1])
    return lambda *args: small.plain(*args)[0], shapes


MODELS: dict[str, Callable[[], tuple[Function, tuple[Any, ...]]]] = {
    f"{LAYERS} layers": lambda: (transformer_loss, transformer_arguments()),
    f"{SCANNED} layers, scanned": lambda: (scanned_loss, scanned_arguments()),
    "ResNet-50": resnet,
}
"""What makes the loss of each model, and its arguments or their shapes."""


def chain(equations: int) -> Function:
    """A function of about that many equations: matrix products with activations between."""

    def run(x: jax.Array) -> jax.Array:
        for _ in range(equations // 4):
            x = jnp.sin(jax.lax.dot(x, x)) * x + x
        return x

    return run


def seconds_to_trace(make: Callable[[], Function], args: tuple[Any, ...]) -> float:
    """Time to trace what `make` returns; a function made afresh is in no cache."""
    fn = make()
    start = time.process_time()
    jax.make_jaxpr(fn)(*args)
    return time.process_time() - start


def compare(
    plain: Callable[[], Function], mixed: Callable[[], Function], args: tuple[Any, ...], repeat: int
) -> tuple[float, float]:
    """Median times to trace the two, measured alternately after one round of warming up."""
    rounds = [
        (seconds_to_trace(plain, args), seconds_to_trace(mixed, args)) for _ in range(repeat + 1)
    ][1:]
    return statistics.median(p for p, _ in rounds), statistics.median(m for _, m in rounds)


def fresh(fn: Function) -> Function:
    """The same function under a new identity."""
    return lambda *args: fn(*args)


def seconds_to_plan(jaxpr: ClosedJaxpr, policy: PrecisionPolicy = POLICY) -> float:
    """Time to plan a program that has been traced."""
    start = time.process_time()
    plan_program(jaxpr, policy)
    return time.process_time() - start


def memory_ratio(fn: Function, args: tuple[Any, ...]) -> float:
    """Memory that planning takes at its peak, over what the jaxpr itself takes."""
    jax.make_jaxpr(fresh(fn))(*args)  # what JAX keeps of library functions is not the program's
    gc.collect()
    tracemalloc.start()
    try:
        jaxpr = jax.make_jaxpr(fresh(fn))(*args)
        gc.collect()
        own = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        plan_program(jaxpr, POLICY)
        return (tracemalloc.get_traced_memory()[1] - own) / own
    finally:
        tracemalloc.stop()


def count_equations(jaxpr: ClosedJaxpr) -> int:
    """The number of equations at the top level."""
    return len(jaxpr.jaxpr.eqns)


def measure_models(table: Table, repeat: int, policy: PrecisionPolicy = POLICY) -> float:
    """Adds a row for each model and order of `amp` and `grad`; returns the largest ratio."""
    grad, mixed = jax.value_and_grad, functools.partial(amp, policy=policy)
    ratios = []
    for name, make in MODELS.items():
        loss, args = make()
        orders = {
            "value_and_grad({}(f))": (loss, lambda by, loss=loss: grad(by(fresh(loss)))),
            "{}(value_and_grad(f))": (grad(loss), lambda by, loss=loss: by(grad(fresh(loss)))),
        }
        for order, (planned, under) in orders.items():

            def alone(loss: Function = loss) -> Function:
                return grad(fresh(loss))

            before, after = compare(alone, lambda under=under: under(mixed), args, repeat)
            jitted = compare(alone, lambda under=under: under(jax.jit), args, repeat)
            plan = seconds_to_plan(jax.make_jaxpr(fresh(planned))(*args), policy)
            cells = _cells(before, after, plan, memory_ratio(planned, args))
            row = f"{name}, {order.format('amp')}"
            table.add_row(row, *cells, "", f"{jitted[1] / jitted[0]:.2f}")
            ratios.append(after / before)
    return max(ratios)


def measure_chains(table: Table, repeat: int) -> None:
    """Adds a row for each length; linear growth shows as a constant time per equation."""
    args = (jnp.ones((8, 8)),)
    for size in SIZES:
        fn = chain(size)
        jaxpr = jax.make_jaxpr(fresh(fn))(*args)
        count, plan = count_equations(jaxpr), seconds_to_plan(jaxpr)
        rounds = 1 if size > MANY else repeat
        before, after = compare(lambda fn=fn: fresh(fn), lambda fn=fn: amp(fresh(fn)), args, rounds)
        added = (after - before) / count * 1e6
        cells = _cells(before, after, plan, memory_ratio(fn, args))
        table.add_row(f"chain of {count:,} equations", *cells, f"{added:.0f} µs")


def _cells(before: float, after: float, plan: float, memory: float) -> tuple[str, ...]:
    times = f"{before:.3f} s", f"{after:.3f} s", f"{after / before:.2f}"
    return *times, f"{plan:.3f} s", f"{memory:.2f}"


def _table(programs: str) -> Table:
    table = Table(title=f"Tracing {programs} under mixed_bf16, JAX {jax.__version__}")
    table.add_column("program")
    added = "added per equation", "jax.jit instead"
    for heading in ("f alone", "with amp", "ratio", "planning", "memory", *added):
        table.add_column(heading, justify="right")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and compare with the bound if one is given."""
    parser = argparse.ArgumentParser(description="What amp adds to tracing.")
    parser.add_argument("--repeat", type=int, default=7, help="rounds after the first (default 7)")
    parser.add_argument("--max-ratio", type=float, help="fail if a model's is larger")
    parser.add_argument("--only", choices=("models", "chains"), help="leave the other table out")
    parser.add_argument("--no-collector", action="store_true", help="no garbage collection")
    parser.add_argument("--fused-attention", action="store_true", help="look for it in models")
    options = parser.parse_args(argv)
    if options.only == "chains" and options.max_ratio is not None:
        parser.error("--max-ratio is about models, which --only chains leaves out")

    if options.no_collector:
        gc.disable()
    console, ratio = Console(), 0.0
    if options.only != "chains":
        policy = POLICY.replace(fused_attention=options.fused_attention or None)
        ratio = measure_models(models_table := _table("models"), options.repeat, policy)
        console.print(models_table)
    if options.only != "models":
        measure_chains(chains_table := _table("chains"), options.repeat)
        console.print(chains_table)
    if options.max_ratio is not None and ratio > options.max_ratio:
        console.print(f"ratio {ratio:.2f} is above {options.max_ratio:.2f}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
