"""Training on one accelerator: throughput, memory and loss of each way to choose a precision.

    python -m benchmarks.gpu_train                       all models and ways, default device
    python -m benchmarks.gpu_train --model 350m --way amp-bf16 hand-bf16
    python -m benchmarks.gpu_train --toy --steps 3         sizes for a CPU, to try the script

Each run has a process of its own, so that its peak memory is its own; while one is on the device
the next is traced. Prints a table; figures go to out/gpu_train.json with versions and device. What
that file holds already is not run again: a run that was cut goes on where it stopped.
Neither compiling nor the first steps are timed with the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax
from rich.console import Console
from rich.table import Table

import jaxamp
from benchmarks.deviceless.models import fused
from benchmarks.deviceless.models.fused import FUSED
from benchmarks.deviceless.models.model import HAND, Loss, Size
from benchmarks.gpu_models import MODELS, TOYS
from jaxamp import PrecisionPolicy, training

WARM = 3
TURN = "your turn\n"  # what a process waits for before it uses the device
PART = 10  # steps between two looks at the clock; the median part's throughput is reported
LAST = 10  # steps whose losses are averaged


@dataclass(frozen=True)
class Way:
    """How a model is trained.

    Attributes:
      policy: of `amp`; ``None`` without it.
      hand: the version by hand; ``None`` for the plain program.
      fused: whether `amp` may replace attention by a fused kernel.
      whole_step: whether `amp` is around the whole step, else around the loss alone.
      matmul: JAX's own precision of float32 products.
    """

    policy: str | None = None
    hand: str | None = None
    fused: bool = True
    whole_step: bool = True
    matmul: str = "default"


WAYS = {
    "f32": Way(matmul="highest"),
    "tf32": Way(matmul="tensorfloat32"),
    "hand-bf16": Way(hand=HAND),
    "hand-fused": Way(hand=FUSED),
    "amp-bf16": Way("auto_mixed_bf16"),
    "amp-bf16-composed": Way("auto_mixed_bf16", fused=False),
    "amp-loss-bf16": Way("auto_mixed_bf16", whole_step=False),
    "amp-f16": Way("auto_mixed"),
    "amp-fp8": Way("fp8_current"),
    "amp-fp8-delayed": Way("fp8_delayed"),
}
"""`hand-bf16` attends as XLA has it, `hand-fused` by the kernel of cuDNN."""


def policy_of(way: Way) -> PrecisionPolicy:
    """The policy of a way that has one."""
    return PrecisionPolicy.parse(way.policy).replace(fused_attention=None if way.fused else False)


def make_step(size: Size, way: str) -> tuple[Any, Callable[..., Any]]:
    """A jitted train step, and what makes its first two arguments.

    Args:
      size: the model.
      way: a key of `WAYS`.

    Returns:
      A step from (params, state, batch) to the same and the loss, which donates what it replaces;
      a function from a key to the parameters and the optimizer's state.
    """
    chosen = WAYS[way]
    adam = optax.adamw(3e-4)
    scaling = chosen.policy == "auto_mixed"
    optimizer = training.with_loss_scale(adam) if scaling else adam
    loss: Loss = size.hands[chosen.hand] if chosen.hand else size.plain
    if chosen.policy and not chosen.whole_step:
        loss = jaxamp.amp(loss, policy_of(chosen))

    def step(params: Any, state: Any, batch: Any) -> Any:
        def scaled(params: Any) -> tuple[Any, Any]:
            value = loss(params, batch)[0]
            return (state.loss_scale.scale(value) if scaling else value), value

        (_, value), grads = jax.value_and_grad(scaled, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def begin(key: jax.Array) -> tuple[Any, Any]:
        params = size.init(key)
        return params, optimizer.init(params)

    if chosen.policy and chosen.whole_step:
        step = jaxamp.amp(step, policy_of(chosen))
    if hasattr(step, "init"):
        step, begin = _with_history(step, begin, size)
    return jax.jit(step, donate_argnums=(0, 1)), begin


def _with_history(step: Any, begin: Any, size: Size) -> tuple[Any, Any]:
    """A step with delayed scaling that keeps its history beside the optimizer's state."""

    def kept(params: Any, state: Any, batch: Any) -> Any:
        inner, history = state
        (params, inner, value), history = step(history, params, inner, batch)
        return params, (inner, history), value

    def begun(key: jax.Array) -> tuple[Any, Any]:
        params, state = begin(key)
        shapes = jax.eval_shape(step.init, params, state, jax.eval_shape(size.sample, key))
        zeros = jax.tree.map(lambda a: jax.numpy.zeros(a.shape, a.dtype), shapes)
        return params, (state, zeros)

    return kept, begun


def items(size: Size) -> int:
    """Tokens, or images, of a batch."""
    batch = jax.eval_shape(size.sample, jax.random.key(0))
    if not isinstance(batch, tuple):  # a language model's words, and one more to be foretold
        return batch.shape[0] * (batch.shape[1] - 1)
    if batch[0].ndim == 4:  # images
        return batch[0].shape[0]
    return math.prod(batch[1].shape)


def measure(
    model: str, way: str, steps: int, seconds: float, toy: bool, turn: Callable[[], object]
) -> dict[str, Any]:
    """One run, in this process.

    Args:
      model: a key of `MODELS`.
      way: one of `WAYS`.
      steps: how many are timed.
      seconds: after which no further part is begun.
      toy: whether in the size for a CPU.
      turn: called before anything is put on the device.

    Returns:
      What was measured: a row of the table and of the file.
    """
    size = (TOYS if toy else MODELS)[model]()
    platform = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    with jax.default_matmul_precision(WAYS[way].matmul), fused.tracing_for(platform):
        step, begin = make_step(size, way)
        key = jax.random.key(0)
        batch = jax.eval_shape(size.sample, key)
        start = time.perf_counter()
        traced = step.trace(*jax.eval_shape(begin, key), batch)
        tracing = time.perf_counter() - start
        turn()
        start = time.perf_counter()
        compiled = traced.lower().compile()
        compiling = time.perf_counter() - start
        times, losses = _train(compiled, size, jax.jit(begin)(key), steps, seconds)
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "model": model,
        "way": way,
        "items_per_second": items(size) / statistics.median(times),
        "slowest_part": items(size) / max(times),
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "tracing_seconds": tracing,
        "compiling_seconds": compiling,
        "first_loss": losses[0],
        "last_loss": sum(losses[-LAST:]) / len(losses[-LAST:]),
        "losses": losses,
        "steps": len(losses) - WARM,
        "toy": toy,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def _train(
    step: Callable[..., Any], size: Size, began: tuple[Any, Any], steps: int, seconds: float
) -> tuple[list[float], list[float]]:
    """Seconds of a step in each part, and the losses of all steps, those before them too."""
    batches, losses, times = _batches(size), [], []
    params, state = began
    parts = [WARM, *(min(PART, steps - begun) for begun in range(0, steps, PART))]
    stop = time.perf_counter() + seconds
    for part in parts:
        if len(times) > 1 and time.perf_counter() > stop:
            break
        ready = jax.block_until_ready(list(itertools.islice(batches, part)))
        start = time.perf_counter()
        for batch in ready:
            params, state, value = step(params, state, batch)
            losses.append(value)
        jax.block_until_ready(params)
        times.append((time.perf_counter() - start) / part)
    return times[1:], [float(value) for value in losses]


def _batches(size: Size) -> Iterator[Any]:
    sample = jax.jit(size.sample)
    key = jax.random.key(1)
    while True:
        key, one = jax.random.split(key)
        yield sample(one)


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
    parser.add_argument("--seconds", type=float, default=math.inf, help="of one run's steps")
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU")
    parser.add_argument("--json", type=Path, default=Path("out/gpu_train.json"))
    parser.add_argument("--here", action="store_true", help="one run, in this process, as JSON")
    options = parser.parse_args(argv)
    if options.here:
        wanted = options.model[0], options.way[0], options.steps, options.seconds, options.toy
        print(json.dumps(measure(*wanted, turn=sys.stdin.readline)))
        return 0
    runs = [
        run for run in itertools.product(options.model, options.way) if _exists(*run, options.toy)
    ]
    rows = _kept(options.json, options.toy)
    known = {(row["model"], row["way"]) for row in rows}
    for row in _in_turn([run for run in runs if run not in known], options):
        rows.append(row)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    rows = [row for row in rows if (row["model"], row["way"]) in runs]
    show(rows, Console())
    return int(any("error" in row for row in rows))


def _exists(model: str, way: str, toy: bool) -> bool:
    """Whether a model has such a version: those that do not attend have no fused hand."""
    size = (TOYS if toy else MODELS)[model]()
    return (WAYS[way].hand or HAND) in size.hands and (WAYS[way].fused or FUSED in size.hands)


def _kept(path: Path, toy: bool) -> list[dict[str, Any]]:
    """Rows of an earlier call by this JAX, without those that failed."""
    rows = json.loads(path.read_text()) if path.exists() else []
    return [
        row
        for row in rows
        if "error" not in row and row["toy"] == toy and row["jax"] == jax.__version__
    ]


def _in_turn(
    runs: Sequence[tuple[str, str]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Each run's row; a run's process starts, and traces, while the one before has the device."""
    if not runs:
        return
    following = _start(*runs[0], options)
    try:
        for index, (model, way) in enumerate(runs):
            process = following
            if index + 1 < len(runs):
                following = _start(*runs[index + 1], options)
            said, complained = process.communicate(TURN)
            if process.returncode:
                line = (complained.strip().splitlines() or ["killed"])[-1]
                yield {"model": model, "way": way, "error": line[:120]}
            else:
                yield json.loads(said.splitlines()[-1])
    finally:
        following.kill()  # it would take the turn of one that was interrupted


def _start(model: str, way: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_train", "--here"]
    command += ["--model", model, "--way", way]
    command += ["--steps", str(options.steps), "--seconds", str(options.seconds)]
    command += ["--toy"] if options.toy else []
    # Two processes share the device; all of its memory taken at once would be too much.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


if __name__ == "__main__":
    sys.exit(main())
