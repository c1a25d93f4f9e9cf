"""Compare a loss in chunks of tokens, found by jaxamp or written by hand, with logits stored.

    python -m benchmarks.losses --target h200
    python -m benchmarks.losses --target h200 --model gemma --way "hand, loss in chunks"
    python -m benchmarks.losses --target h200 --trace

Loss and gradient of a language model are compiled for a chip that is not there
(``python -m jaxamp estimate --install gpu``, or ``tpu``). With ``--trace`` they are traced alone,
in turns: what it adds in time of the processor that the loss is found.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import jaxamp
from benchmarks.deviceless.models import EVERY, fused
from benchmarks.deviceless.models.fused import FUSED
from benchmarks.deviceless.models.heads import CHUNKED
from benchmarks.deviceless.models.model import HAND, Size
from benchmarks.deviceless.variants import ORDERS
from jaxamp.compiled import traffic
from jaxamp.compiled.deviceless import compile_all, exported
from jaxamp.compiled.roofline import roofline
from jaxamp.compiled.targets import TARGETS

POLICY = jaxamp.PrecisionPolicy.MIXED_BF16.replace(fused_attention=True)
WORDS = False, None, "memory"
HANDS = FUSED, CHUNKED
ROUNDS = 5
AMP = {f"{order}, {word}": (order, word) for word in WORDS for order in ORDERS}


def way(size: Size, name: str) -> Callable[..., Any]:
    """Value and gradient: by hand, or in one order under one word for ``loss_in_chunks``."""

    def gradient(loss: Any) -> Any:
        return jax.value_and_grad(loss, has_aux=True)

    if name in HANDS:
        return gradient(size.hands.get(name, size.hands[HAND]))
    order, word = AMP[name]
    policy = POLICY.replace(loss_in_chunks=word)
    if order == ORDERS[0]:
        return gradient(jaxamp.amp(size.plain, policy))
    return jaxamp.amp(gradient(size.plain), policy)


def trace_ratios(size: Size, args: tuple[Any, ...]) -> dict[str, float]:
    """Return how long tracing takes where the loss is found, against where none is looked for."""
    ratios: dict[str, float] = {}
    for order in ORDERS:
        times: dict[Any, list[float]] = {None: [], False: []}
        for word in [*times] * ROUNDS:
            jax.clear_caches()
            start = time.process_time()
            jax.make_jaxpr(way(size, f"{order}, {word}"))(*args)
            times[word].append(time.process_time() - start)
        found, left = map(min, times.values())
        ratios[order] = found / left
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.losses", description=__doc__)
    parser.add_argument("--target", required=True, choices=TARGETS)
    models = [name for name, model in EVERY.items() if CHUNKED in model.full.hands]
    parser.add_argument("--model", choices=models, default="llama")
    parser.add_argument("--way", nargs="+", choices=[*HANDS, *AMP], default=[*HANDS, *AMP])
    parser.add_argument("--trace", action="store_true")
    options = parser.parse_args()
    chip, size = TARGETS[options.target], EVERY[options.model].full
    args = tuple(jax.eval_shape(make, jax.random.key(0)) for make in (size.init, size.sample))
    if options.trace:
        with chip.described(), fused.on(chip.platform):
            for order, ratio in trace_ratios(size, args).items():
                print(f"{order}: traced in {ratio:.2f} times the time")
        return
    shown = Table("way", "temporary", "bytes moved", "roofline", title=f"for {options.target}")
    with chip.described(), fused.on(chip.platform):
        programs = [
            exported(way(size, name), lambda f: f, args, {}, chip.platform) for name in options.way
        ]
    for name, (module, facts) in zip(options.way, compile_all(chip, programs), strict=True):
        moved, time = traffic.measure(module).bytes, roofline(module, chip).seconds
        sizes = (f"{n / 1e9:.3f} GB" for n in (facts["temporary"], moved))
        shown.add_row(name, *sizes, f"{time * 1e3:.2f} ms")
    Console(width=100).print(shown)


if __name__ == "__main__":
    main()
