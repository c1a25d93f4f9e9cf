"""How a model is trained under each choice of precision, and timed: what `on_a_gpu` runs.

Each way begins from the same parameters. Neither compiling nor the first steps are timed. Memory is
what XLA plans for a step: arguments, results and temporary arrays.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import jax
import optax

import jaxamp
from benchmarks.any_size import of_any_size
from benchmarks.deviceless.models import fused
from benchmarks.deviceless.models.fused import FUSED
from benchmarks.deviceless.models.model import HAND, Loss, Size
from benchmarks.gpu_models import MODELS, TOYS
from jaxamp import PrecisionPolicy, training

WARM = 3
PART = 10  # steps between two looks at the clock
LAST = 10  # steps whose losses are averaged
MEASURED = 16  # of as many steps with carried parameters one finds magnitudes

Row = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """How a model is trained.

    Attributes:
      policy: of `amp`; ``None`` without it.
      hand: the version by hand; ``None`` for the plain program.
      fused: whether `amp` may replace attention by a fused kernel.
      chunks: whether `amp` may compute the loss in chunks of tokens.
      whole_step: whether `amp` is around the whole step, else around the loss alone.
      carried: whether a step quantizes its parameters for the next one; then one step of `MEASURED`
        finds magnitudes.
      matmul: JAX's own precision of float32 products.
      any_size: whether FP8 scales products of any size, as those of a toy are.
    """

    policy: str | None = None
    hand: str | None = None
    fused: bool = True
    chunks: bool = True
    whole_step: bool = True
    carried: bool = False
    matmul: str = "default"
    any_size: bool = False


WAYS = {
    "f32": Way(matmul="highest"),
    "tf32": Way(matmul="tensorfloat32"),
    "hand-bf16": Way(hand=HAND),
    "hand-fused": Way(hand=FUSED),
    "amp-bf16": Way("auto_mixed_bf16"),
    "amp-bf16-composed": Way("auto_mixed_bf16", fused=False),
    "amp-bf16-stored": Way("auto_mixed_bf16", chunks=False),
    "amp-loss-bf16": Way("auto_mixed_bf16", whole_step=False),
    "amp-f16": Way("auto_mixed"),
    "amp-fp8": Way("fp8_current"),
    "amp-fp8-delayed": Way("fp8_delayed"),
    "amp-fp8-carried": Way("fp8_delayed", carried=True),
}
"""`hand-bf16` attends as XLA has it, `hand-fused` by the kernel of cuDNN."""


def policy_of(way: Way) -> PrecisionPolicy:
    """The policy of a way that has one."""
    policy = PrecisionPolicy.parse(way.policy).replace(
        fused_attention=None if way.fused else False,
        loss_in_chunks=None if way.chunks else False,
    )
    if way.carried:
        policy = policy.replace(scaling={"carried": True})
    return of_any_size(policy) if way.any_size else policy


def make_step(size: Size, way: Way, *, measures: bool = True) -> tuple[Any, Callable[..., Any]]:
    """A jitted train step, and what makes its first two arguments.

    Args:
      size: the model.
      way: how it is trained.
      measures: whether a step with delayed scaling finds magnitudes.

    Returns:
      A step from (params, state, batch) to the same and the loss, which donates what it replaces;
      a function from a key to the parameters and the optimizer's state.
    """
    adam = optax.adamw(3e-4)
    scaling = way.policy == "auto_mixed"
    optimizer = training.with_loss_scale(adam) if scaling else adam
    loss: Loss = size.hands[way.hand] if way.hand else size.plain
    if not size.gradient:
        return _make_inference(size, jaxamp.amp(loss, policy_of(way)) if way.policy else loss)
    if way.policy and not way.whole_step:
        loss = jaxamp.amp(loss, policy_of(way))

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

    if way.policy and way.whole_step:
        step = jaxamp.amp(step, policy_of(way))
    if hasattr(step, "init"):
        step, begin = _with_history(step, begin, size, measures=measures)
    return jax.jit(step, donate_argnums=(0, 1)), begin


def _make_inference(size: Size, loss: Loss) -> tuple[Any, Callable[..., Any]]:
    """A step of a model that is not trained: what `size.init` draws is parameters and a state."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, state = loss((params, state), batch)
        return params, state, value

    return jax.jit(step, donate_argnums=(0, 1)), size.init


def _with_history(step: Any, begin: Any, size: Size, *, measures: bool) -> tuple[Any, Any]:
    """A step with delayed scaling that keeps its history beside the optimizer's state."""
    run = step if measures else step.unmeasured

    def kept(params: Any, state: Any, batch: Any) -> Any:
        inner, history = state
        (params, inner, value), history = run(history, params, inner, batch)
        return params, (inner, history), value

    def begun(key: jax.Array) -> tuple[Any, Any]:
        params, state = begin(key)
        return params, (state, step.init(params, state, size.sample(key)))

    return kept, begun


def items(size: Size) -> int:
    """Tokens, images or sequences of a batch."""
    batch = jax.eval_shape(size.sample, jax.random.key(0))
    if not size.gradient:
        return batch.size
    if not isinstance(batch, tuple):  # a language model's words, and one more to be foretold
        return batch.shape[0] * (batch.shape[1] - 1)
    if batch[0].ndim == 4:  # images
        return batch[0].shape[0]
    return math.prod(batch[1].shape)


@dataclass
class Version:
    """A model's steps under one way, compiled, and what makes their first state.

    Attributes:
      size: the model.
      steps: one after the other they are run, and from the first again.
      begin: makes parameters and state.
    """

    size: Size
    steps: Sequence[Callable[..., Any]]
    begin: Callable[[jax.Array], Any]

    def train(self, steps: int, seconds: float = math.inf) -> tuple[list[float], list[float]]:
        """Train from the first state.

        Args:
          steps: how many are timed, after those to warm up.
          seconds: after which no further part is begun.

        Returns:
          Seconds of a step in each part, and the losses of all steps, those before them too.
        """
        batches, losses, times = _batches(self.size), [], []
        steps_in_turn = itertools.cycle(self.steps)
        params, state = self.begin(jax.random.key(0))
        parts = [WARM, *(min(PART, steps - begun) for begun in range(0, steps, PART))]
        stop = time.perf_counter() + seconds
        for part in parts:
            if len(times) > 1 and time.perf_counter() > stop:
                break
            ready = jax.block_until_ready(list(itertools.islice(batches, part)))
            start = time.perf_counter()
            for batch in ready:
                params, state, value = next(steps_in_turn)(params, state, batch)
                losses.append(value)
            jax.block_until_ready(params)
            times.append((time.perf_counter() - start) / part)
        return times[1:], [float(value) for value in losses]


def compiled(size: Size, way: Way, alone: Callable[[], Any] = nullcontext) -> tuple[Version, Row]:
    """Compile a way of a model, and tell what that took and what a step needs.

    Args:
      size: the model.
      way: how it is trained.
      alone: in what it makes XLA compiles, as that tries kernels on the device.
    """
    platform = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    tracing = compiling = 0.0
    made = []
    with jax.default_matmul_precision(way.matmul), fused.tracing_for(platform):
        first, begin = make_step(size, way)
        others = [make_step(size, way, measures=False)[0]] if way.carried else []
        key = jax.random.key(0)
        for step in (first, *others):
            start = time.perf_counter()
            shapes = jax.eval_shape(begin, key), jax.eval_shape(size.sample, key)
            traced = step.trace(*shapes[0], shapes[1])
            lowered = traced.lower()
            tracing += time.perf_counter() - start
            with alone():
                start = time.perf_counter()
                made.append(lowered.compile())
                compiling += time.perf_counter() - start
    memory = max((one.memory_analysis() for one in made), key=_peak)
    facts = {
        "peak_bytes": _peak(memory),
        "temporary_bytes": memory.temp_size_in_bytes,
        "tracing_seconds": tracing,
        "compiling_seconds": compiling,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "jaxamp": jaxamp.__version__,
        "date": date.today().isoformat(),
    }
    return Version(size, [*made[:1], *made[1:] * (MEASURED - 1)], jax.jit(begin)), facts


def _peak(memory: Any) -> int:
    """Bytes that a program needs at most, by XLA's plan."""
    arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return arrays - memory.alias_size_in_bytes + memory.temp_size_in_bytes


def one_round(version: Version, row: Row, seconds: float) -> None:
    """Time a way once, and add it to its row.

    Args:
      version: what is trained.
      row: of the file; its first round decides how many steps the others have.
      seconds: of a round.
    """
    rounds: list[float] = row.setdefault("rounds", [])
    steps = row.get("round_steps")
    if steps is None:
        times, losses = version.train(PART, seconds)
        row["round_steps"] = max(3, min(5 * PART, int(seconds / statistics.median(times))))
        row |= {"first_loss": losses[0], "losses": losses, "steps": len(losses) - WARM}
        row["last_loss"] = statistics.mean(losses[-LAST:])
    else:
        times, _ = version.train(steps)
    rounds.append(items(version.size) / statistics.median(times))
    row["items_per_second"] = statistics.median(rounds)
    row["spread"] = (max(rounds) - min(rounds)) / row["items_per_second"]


class File:
    """The rows of earlier calls and of this one."""

    def __init__(self, path: Path, toy: bool) -> None:
        self.path = path
        rows = json.loads(path.read_text()) if path.exists() else []
        self.rows: dict[tuple[str, str], Row] = {
            (row["model"], row["way"]): row
            for row in rows
            if "error" not in row and row["toy"] == toy and row["jax"] == jax.__version__
        }

    def rounds(self, model: str, way: str) -> int:
        """How often a way has been timed already."""
        return len(self.rows.get((model, way), {}).get("rounds", ()))

    def check(self, device: str) -> None:
        """Refuse to go on with what another device has timed; rounds of two would be one median."""
        others = {row["device"] for row in self.rows.values() if "device" in row} - {device}
        if others:
            raise SystemExit(
                f"{self.path} has rows of {', '.join(sorted(others))}, and this is {device}: name "
                "another file by --json."
            )

    def keep(self, row: Row) -> None:
        """Write a row; whoever is cut meanwhile leaves the file as it was."""
        self.rows[row["model"], row["way"]] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps([*self.rows.values()], indent=1) + "\n")
        beside.replace(self.path)


@contextmanager
def _noted(file: File, model: str, way: str, toy: bool) -> Iterator[Row]:
    """A row to be filled, kept as it is afterwards or with the error that came."""
    row = file.rows.get((model, way), {"model": model, "way": way, "toy": toy})
    try:
        yield row
    except Exception as error:  # one that is too large for the device leaves the others be
        row["error"] = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        row.setdefault("jax", jax.__version__)
    file.keep(row)


def _batches(size: Size) -> Iterator[Any]:
    sample = jax.jit(size.sample)
    key = jax.random.key(1)
    while True:
        key, one = jax.random.split(key)
        yield sample(one)


def _exists(model: str, way: str, toy: bool) -> bool:
    """Whether a model has such a version: those that do not attend have no fused hand."""
    size = (TOYS if toy else MODELS)[model]()
    return (WAYS[way].hand or HAND) in size.hands and (WAYS[way].fused or FUSED in size.hands)
