"""Reports against compiled programs: the same dots, the same FLOPs?

    python -m benchmarks.deviceless.agreement --target h200

For each model's training step, in float32 and under the default policy: the dots and convolutions
that ``jaxamp.report`` counts from the plan, and those that the compiler made. It is told not to
merge several dots that read the same operand into one, which changes their number and no FLOP.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import jaxamp
from benchmarks.deviceless.models import MODELS
from benchmarks.deviceless.variants import POLICY
from jaxamp.compiled.deviceless import compile_all, exported
from jaxamp.compiled.targets import TARGETS
from jaxamp.compiled.traffic import measure
from jaxamp.errors import JaxAmpError

UNMERGED = {"xla_disable_hlo_passes": "dot-merger"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.deviceless.agreement",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", choices=TARGETS, default="h200")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=[*MODELS])
    options = parser.parse_args(argv)
    shown = Table(title=f"dots and convolutions: the report, and the program for {options.target}")
    for heading in ("model", "policy", "report", "compiled", "FLOPs, compiled / report"):
        shown.add_column(heading)
    for name in options.model:
        for row in agreement(options.target, name):
            shown.add_row(*row)
    Console(width=120).print(shown)
    return 0


def agreement(target: str, name: str) -> list[tuple[str, ...]]:
    """A row for each policy."""
    size = MODELS[name].full
    step = jax.value_and_grad(size.plain, has_aux=True)
    args = (
        jax.eval_shape(size.init, jax.random.key(0)),
        jax.eval_shape(size.sample, jax.random.key(0)),
    )
    policies = ("always_f32", POLICY)
    chip = TARGETS[target]
    with chip.described():
        programs = [
            exported(step, lambda f, p=p: jaxamp.amp(f, p), args, {}, chip.platform)
            for p in policies
        ]
    rows = []
    compiled = compile_all(chip, programs, UNMERGED)
    for policy, (module, _) in zip(policies, compiled, strict=True):
        found = jaxamp.report(step, policy)(*args)
        flops = sum(o.tally.flops for o in found.contractions)
        counted = measure(module)
        ratio = f"{counted.flops / flops:.5f}"
        rows.append((name, policy, _words(found.dots()), _words(counted.dots), ratio))
    return rows


def _words(dots: dict[str, Any]) -> str:
    return ", ".join(f"{n} {word}" for word, n in sorted(dots.items()))


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except JaxAmpError as error:
        raise SystemExit(str(error)) from None
