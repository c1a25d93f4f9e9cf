"""What a user waits for before the first result: tracing, lowering and compiling.

    python -m benchmarks.waiting
    python -m benchmarks.waiting --model transformer vit --repeat 5
    python -m benchmarks.waiting --target h200     by a chip's own compiler, without the chip
    python -m benchmarks.waiting --model resnet50 --json FILE     figures of each round, appended

The value and gradient of the models of `benchmarks.deviceless`, in full size, compiled and not run:
in bfloat16 by hand, and by `amp` in both orders. Versions alternate, after a round of
warming up; before each JAX forgets what it has traced, as in a process that has just begun. Times
are those of the processor, threads of the compiler included. Other work on the machine adds up to
half to them, by caches and cores that it shares, and takes nothing off: the least round is shown.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.deviceless.models import EVERY
from benchmarks.deviceless.models.model import HAND, Size
from benchmarks.deviceless.variants import FORWARD, ORDERS, variants
from jaxamp.compiled.compiler import one_device
from jaxamp.compiled.deviceless import ENVIRONMENTS
from jaxamp.compiled.targets import TARGETS

STAGES = ("trace", "lower", "compile")

Seconds = dict[str, float]


def seconds_of_stages(fn: Callable[..., Any], shapes: tuple[Any, ...]) -> Seconds:
    """Processor time of each of `STAGES` for a function that JAX has not seen."""
    jax.clear_caches()
    gc.collect()
    times = [time.process_time()]

    def passed(result: Any) -> Any:
        times.append(time.process_time())
        return result

    traced = passed(jax.jit(lambda *args: fn(*args)).trace(*shapes))
    passed(passed(traced.lower()).compile())
    return {stage: times[i + 1] - times[i] for i, stage in enumerate(STAGES)}


def shapes_of(size: Size, target: str | None) -> tuple[Any, ...]:
    """The shapes of a model's parameters and of a batch, on an absent chip if one is named."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = jax.eval_shape(size.init, key), jax.eval_shape(size.sample, key)
    if target is None:
        return shapes
    chip = TARGETS[target]
    place = one_device(chip.platform, chip.topology, chip.description)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)


def described(target: str | None) -> AbstractContextManager[None]:
    """Lower programs for an absent chip, if one is named."""
    return TARGETS[target].described() if target else nullcontext()


def rounds(size: Size, repeat: int, target: str | None = None) -> dict[str, list[Seconds]]:
    """The times of each version, measured in turn after one round of warming up."""
    shapes = shapes_of(size, target)
    names = [name for name in (HAND, *ORDERS, FORWARD) if name in variants(size)]
    found: dict[str, list[Seconds]] = {name: [] for name in names}
    for _ in range(repeat + 1):
        for name in names:
            with described(target):
                found[name].append(seconds_of_stages(variants(size)[name], shapes))
    return {name: seconds[1:] for name, seconds in found.items()}


def least(found: list[Seconds]) -> Seconds:
    """Return the round that took least, and the whole of it."""
    seconds = min(found, key=lambda seconds: sum(seconds.values()))
    return {"whole": sum(seconds.values()), **seconds}


def add_rows(table: Table, name: str, found: dict[str, list[Seconds]]) -> None:
    """Add the rows of a model: seconds by hand, and ratios to them."""
    by_hand = least(found[HAND])
    for order in [name for name in found if name != HAND]:
        ours = least(found[order])
        ratios = (f"{ours[part] / by_hand[part]:.2f}" for part in by_hand)
        table.add_row(name, order, f"{by_hand['whole']:.2f} s", *ratios)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="What a user waits for before the first result.")
    parser.add_argument("--model", nargs="+", choices=EVERY, default=list(EVERY))
    parser.add_argument("--repeat", type=int, default=3, help="rounds after the first (default 3)")
    parser.add_argument("--json", type=Path, help="figures of each round are appended to this file")
    parser.add_argument("--target", choices=TARGETS, help="a chip (default: the CPU)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.target and not options.inside:
        words = sys.argv[1:] if argv is None else argv
        environment = ENVIRONMENTS[TARGETS[options.target].environment]
        environment.run("-m", "benchmarks.waiting", "--inside", *words)
        return 0
    where = options.target or "CPU"
    table = Table(title=f"Tracing, lowering and compiling for {where}, JAX {jax.__version__}")
    for heading in ("model", "order", "by hand", "ratio", *STAGES):
        table.add_column(heading, justify="left" if heading in ("model", "order") else "right")
    for name in options.model:
        found = rounds(EVERY[name].full, options.repeat, options.target)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps({"model": name, "rounds": found}) + "\n")
        add_rows(table, name, found)
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
