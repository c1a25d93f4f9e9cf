"""Training on one accelerator: throughput, memory and loss of each way to choose a precision.

    python -m benchmarks.gpu_train                       all models and ways, default device
    python -m benchmarks.gpu_train --model 350m --way amp-bf16 hand-bf16
    python -m benchmarks.gpu_train --toy --steps 3         sizes for a CPU, to try the script

Each run has a process of its own, so that its peak memory is its own. Prints a table; figures go to
out/gpu_train.json with versions and device. The first steps, which compile, are not timed.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from rich.console import Console
from rich.table import Table

import jaxamp
from benchmarks.deviceless.models import resnet, transformer, vit
from benchmarks.deviceless.models.model import HAND, Loss, Size

WARM = 3
REPEATS = 5  # parts of the timed steps; the median of their throughputs is reported


def _transformer(layers: int, width: int, heads: int, batch: int) -> Size:
    config = transformer.Config(layers, width, heads, 1024, batch, 50304)
    return transformer._size(config, scanned=True)


MODELS: dict[str, Callable[[], Size]] = {
    "350m": lambda: _transformer(24, 1024, 16, 16),
    "1.3b": lambda: _transformer(24, 2048, 16, 8),
    "resnet50": lambda: resnet._size(width=64, classes=1000, batch=128, side=224),
    "vit-b": lambda: vit._size(12, 768, 12, 16, 1000, 128, 224),
}
TOYS: dict[str, Callable[[], Size]] = {
    "350m": lambda: transformer.SCANNED.small,
    "1.3b": lambda: transformer.UNROLLED.small,
    "resnet50": lambda: resnet.RESNET50.small,
    "vit-b": lambda: vit.VIT.small,
}
WAYS = ("f32", "tf32", "hand-bf16", "amp-bf16", "amp-f16", "amp-fp8")
MATMULS = {"f32": "highest", "tf32": "tensorfloat32"}
POLICIES = {"amp-bf16": "auto_mixed_bf16", "amp-f16": "auto_mixed", "amp-fp8": "fp8_current"}


def make_step(size: Size, way: str) -> tuple[Callable[..., Any], Any, Any]:
    """A jitted train step, the optimizer's state and the parameters.

    Args:
      size: the model.
      way: a row of `WAYS`.

    Returns:
      A step from (params, state, batch) to the same and the loss; parameters are donated.
    """
    params = jax.jit(size.init)(jax.random.key(0))
    adam = optax.adamw(3e-4)
    optimizer = jaxamp.with_loss_scale(adam) if way == "amp-f16" else adam
    loss: Loss = size.hands[HAND] if way == "hand-bf16" else size.plain

    def step(params: Any, state: Any, batch: Any) -> Any:
        def scaled(params: Any) -> tuple[Any, Any]:
            value = loss(params, batch)[0]
            return (state.loss_scale.scale(value) if way == "amp-f16" else value), value

        (_, value), grads = jax.value_and_grad(scaled, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    if way in POLICIES:
        step = jaxamp.amp(step, POLICIES[way])
    return jax.jit(step, donate_argnums=(0, 1)), jax.jit(optimizer.init)(params), params


def items(size: Size) -> int:
    """Tokens, or images, of a batch."""
    batch = jax.eval_shape(size.sample, jax.random.key(0))
    leaf = jax.tree.leaves(batch)[0]
    return math.prod((leaf.shape[0], leaf.shape[1] - 1)) if leaf.ndim == 2 else leaf.shape[0]


def measure(model: str, way: str, steps: int, toy: bool) -> dict[str, Any]:
    """One run, in this process."""
    size = (TOYS if toy else MODELS)[model]()
    with jax.default_matmul_precision(MATMULS.get(way, "default")):
        step, state, params = make_step(size, way)
        batches = _batches(size)
        losses, times = [], []
        for index in range(steps + WARM):
            batch = jax.block_until_ready(next(batches))
            start = time.perf_counter()
            params, state, value = step(params, state, batch)
            value = jax.block_until_ready(value)
            times.append(time.perf_counter() - start)
            losses.append(float(value))
            if index == WARM - 1:
                times.clear()
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "model": model,
        "way": way,
        "items_per_second": items(size) / _median_of_parts(times),
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "steps": steps,
        "toy": toy,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def _batches(size: Size) -> Iterator[Any]:
    sample = jax.jit(size.sample)
    key = jax.random.key(1)
    while True:
        key, one = jax.random.split(key)
        yield sample(one)


def _median_of_parts(times: Sequence[float]) -> float:
    """Seconds of a step: the median over equal parts of the run."""
    length = max(len(times) // REPEATS, 1)
    parts = [times[i : i + length] for i in range(0, len(times) - length + 1, length)]
    return sorted(sum(part) / len(part) for part in parts)[len(parts) // 2]


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """The runs as a table."""
    table = Table("model", "way", "items/s", "against f32", "peak GiB", "first loss", "last loss")
    base = {
        r["model"]: r["items_per_second"] for r in rows if r["way"] == "f32" and "error" not in r
    }
    for row in rows:
        if "error" in row:
            table.add_row(row["model"], row["way"], row["error"])
            continue
        speed, peak = row["items_per_second"], row["peak_bytes"]
        ratio = f"{speed / base[row['model']]:.2f}" if row["model"] in base else ""
        memory = f"{peak / 2**30:.2f}" if peak else "not told"
        first, last = f"{row['first_loss']:.3f}", f"{row['last_loss']:.3f}"
        table.add_row(row["model"], row["way"], f"{speed:,.0f}", ratio, memory, first, last)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is asked, each in a process of its own."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--way", nargs="+", default=[*WAYS], choices=WAYS)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU")
    parser.add_argument("--json", type=Path, default=Path("out/gpu_train.json"))
    parser.add_argument("--here", action="store_true", help="one run, in this process, as JSON")
    options = parser.parse_args(argv)
    if options.here:
        row = measure(options.model[0], options.way[0], options.steps, options.toy)
        print(json.dumps(row))
        return 0
    rows = []
    for model in options.model:
        for way in options.way:
            rows.append(_in_a_process(model, way, options))
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    show(rows, Console())
    return int(any("error" in row for row in rows))


def _in_a_process(model: str, way: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu_train", "--here"]
    command += ["--model", model, "--way", way, "--steps", str(options.steps)]
    command += ["--toy"] if options.toy else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        line = (done.stderr.strip().splitlines() or ["killed"])[-1]
        return {"model": model, "way": way, "error": line[:120]}
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
