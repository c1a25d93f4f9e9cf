"""FP8 on a GPU: what the kernel reaches of the memory's rate, and FP8 products against bf16.

    python -m benchmarks.gpu_fp8          on a Hopper GPU
    python -m benchmarks.gpu_fp8 --toy    small sizes, on any machine: whether everything runs

Three tables: quantizing against a copy of the same bytes; products per tensor against bf16; and
whether the kernel's results are those of the reference and of the interpreter. A row that is below
its goal says so; without a GPU the times are those of XLA's reference on a CPU and mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

from jaxamp import CastConfig
from jaxamp.kernels import KernelConfig
from jaxamp.kernels.params import mosaic_gpu
from jaxamp.quantized.kernels import block_quantize
from jaxamp.quantized.lowp import ScaledArray, quantize
from jaxamp.quantized.primitives.quantized_product import product

ROWS, SQUARE = (CastConfig("f8_e4m3", sf_block=block) for block in ((1, 128), (128, 128)))
TENSOR = CastConfig("f8_e4m3")
REPEATS = 10  # calls in one timing
TIMINGS = 5


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    matrix: tuple[int, int]
    square: int
    compared: tuple[int, int]


REAL = Sizes((16384, 8192), 8192, (256, 512))
TOY = Sizes((256, 384), 128, (128, 256))


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
      name: what was run.
      shape: on what.
      seconds: of one call.
      rate: bytes or FLOPs per second, in ``unit``.
      unit: of the rate.
      ratio: to the row that it is measured against.
      goal: the least that the ratio should be; ``None`` for the rows measured against.
    """

    name: str
    shape: str
    seconds: float
    rate: float
    unit: str
    ratio: float
    goal: float | None = None


def seconds_of(fn: Callable[..., Any], *args: Any) -> float:
    """Median time of one call; calls are queued, so that launching them is not what is timed."""
    compiled = jax.jit(fn).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(TIMINGS):
        start = time.perf_counter()
        jax.block_until_ready([compiled(*args) for _ in range(REPEATS)])
        times.append((time.perf_counter() - start) / REPEATS)
    return statistics.median(times)


def normal(seed: int, *shape: int) -> jax.Array:
    """Gaussian bf16 numbers."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def size_of(tree: Any) -> int:
    """Bytes of all arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def quantizing(sizes: Sizes) -> Iterator[Row]:
    """Bytes that must be read and written, per second, against a copy of ``x``."""
    x = normal(0, *sizes.matrix)
    shape = " x ".join(map(str, x.shape))
    seconds = seconds_of(lambda x: -x, x)  # XLA would not make a copy of a plain copy
    copy = 2 * x.nbytes / seconds
    yield Row("copy", shape, seconds, copy / 1e9, "GB/s", 1.0)
    forms = {
        "block_quantize 1 x 128": lambda x: block_quantize(x, ROWS),
        "block_quantize 128 x 128": lambda x: block_quantize(x, SQUARE),
        "block_quantize 1 x 128, transposed too": lambda x: block_quantize(
            x, ROWS, transposed=True
        ),
        "quantize by XLA 1 x 128": lambda x: quantize(x, ROWS),
    }
    for name, fn in forms.items():
        moved = x.nbytes + size_of(jax.eval_shape(fn, x))
        seconds = seconds_of(fn, x)
        goal = 0.8 if name == "block_quantize 1 x 128" else None
        yield Row(name, shape, seconds, moved / seconds / 1e9, "GB/s", moved / seconds / copy, goal)


def plain_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a @ b.T`` in bf16."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())))


def per_tensor(a: ScaledArray, b: ScaledArray) -> jax.Array:
    """What ``amp`` makes of a dot with one scale for each operand."""
    return product(a, b, jnp.bfloat16)


def products(sizes: Sizes) -> Iterator[Row]:
    """FLOPs per second of FP8 products of operands that are quantized already, against bf16."""
    n = sizes.square
    wide = normal(1, n, n), normal(2, n, n)
    narrow = tuple(quantize(x, TENSOR) for x in wide)
    flops, shape = 2 * n**3, f"{n} x {n} x {n}"
    base, seconds = seconds_of(plain_product, *wide), seconds_of(per_tensor, *narrow)
    yield Row("bf16", shape, base, flops / base / 1e12, "TFLOP/s", 1.0)
    rate = flops / seconds / 1e12
    yield Row("FP8 per tensor", shape, seconds, rate, "TFLOP/s", base / seconds, 1.5)


def comparisons(sizes: Sizes) -> Iterator[tuple[str, str, float]]:
    """Kernel, what it is compared with, and the share of bytes that differ."""
    x = normal(5, *sizes.compared)
    others = {"reference": KernelConfig(backend="reference"), "interpreter": interpreter()}
    for title, other in others.items():
        for cast in (ROWS, SQUARE):
            got = block_quantize(x, cast, transposed=True)
            wanted = block_quantize(x, cast, transposed=True, config=other)
            yield f"block_quantize {cast}, transposed too", title, _differing(got, wanted)


def interpreter() -> KernelConfig:
    """That of Mosaic GPU where JAX has it, else Pallas' own with the TPU kernels."""
    params = getattr(mosaic_gpu(), "InterpretGPUParams", None)
    return KernelConfig(backend="interpret", interpret=params and params())


def _differing(got: Any, wanted: Any) -> float:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    bits = [[np.asarray(leaf).view(np.uint8) for leaf in pair] for pair in pairs]
    return float(np.mean(np.concatenate([(a != b).ravel() for a, b in bits])))


def show(rows: Iterator[Row], title: str, console: Console) -> None:
    """Prints a table of rates."""
    table = Table("", "shape", "ms", "rate", "ratio", "goal", title=title)
    for row in rows:
        goal = "" if row.goal is None else f"{row.goal:.2f}{'' if row.ratio >= row.goal else ' ✗'}"
        rate = f"{row.rate:.1f} {row.unit}"
        table.add_row(
            row.name, row.shape, f"{row.seconds * 1e3:.3f}", rate, f"{row.ratio:.2f}", goal
        )
    console.print(table)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description="FP8 on a GPU")
    parser.add_argument("--toy", action="store_true", help="small sizes, on any machine")
    sizes = TOY if parser.parse_args().toy else REAL
    console, device = Console(), jax.devices()[0]
    if device.platform != "gpu" and sizes is REAL:
        raise SystemExit("There is no GPU here. --toy tries the script without one.")
    console.print(f"JAX {jax.__version__}, {device.device_kind}, {time.strftime('%d %B %Y')}")
    if device.platform != "gpu":
        console.print("No GPU: times are XLA's reference on this machine, and say nothing of one.")
    show(quantizing(sizes), "Quantizing, against a copy", console)
    show(products(sizes), "Products, against bf16", console)
    table = Table("", "compared with", "difference", title="Results")
    for name, title, difference in comparisons(sizes):
        table.add_row(name, title, f"{difference:.1e}")
    console.print(table)


if __name__ == "__main__":
    main()
