"""Save plans and rewritten programs of all corpora as letters, to see which of them a change moves.

    python -m tests.letters save BEFORE.json        in a checkout of the state before
    python -m tests.letters save AFTER.json         in that with the change
    python -m tests.letters compare BEFORE.json AFTER.json

A case is a program, an order of `amp` and `grad`, and a policy: 16 bits in both formats, or 8.
Of each the text of the rewritten program is hashed, and in the order `amp(grad(f))` the plan with
its reasons. Nothing is compiled. What only moves code, or makes planning faster, moves no letter.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tests.flags  # noqa: F401 - sets the XLA flags, before JAX starts
from jaxamp import PrecisionPolicy, amp, plan_of
from tests.transforms import TRANSFORMS, split_floats

Case = tuple[str, Callable[..., Any], tuple[Any, ...]]

POLICIES = {
    "f16": PrecisionPolicy.parse("f16"),
    "bf16": PrecisionPolicy.parse("bf16"),
    "fused bf16": PrecisionPolicy.parse("bf16").replace(fused_attention=True),
    "fp8": PrecisionPolicy.parse("fp8_current").replace(
        scaling={"small": (), "multiple": 1, "ends": True}
    ),
}
ORDERS = "plain", "grad_of_amp", "amp_of_grad"
_ADDRESS = re.compile(r"0x[0-9a-f]+|id=[0-9]+")
RANDOM = 60


def programs() -> Iterator[Case]:
    """Yield the programs of all corpora with arguments, those that can be built here."""
    from tests.fields.registry import FIELD_PROGRAMS
    from tests.found.attention.spellings import SPELLINGS
    from tests.models.registry import MODELS, Trained, build, missing
    from tests.programs import PROGRAMS

    for name, program in PROGRAMS.items():
        yield f"programs/{name}", program.fn, program.args
    importlib.import_module("tests.fields.programs")

    for name, found in FIELD_PROGRAMS.items():
        yield f"fields/{name}", found.fn, found.args
    for name, spelled in SPELLINGS.items():
        if not spelled.missing:
            yield (f"attention/{name}", *spelled.built)
    yield from _random()
    for module in ("solved", "trained"):
        importlib.import_module(f"tests.models.{module}")
    for name in MODELS:
        if not missing(name):
            made = build(name)
            if isinstance(made, Trained):
                yield f"models/{name}", made.loss, (made.params, made.batch)
            else:
                yield f"models/{name}", made.solve, made.args
    from benchmarks import trace_cost

    for name, make in trace_cost.MODELS.items():
        yield (f"benchmarks/{name}", *make())


def _random() -> Iterator[Case]:
    """Yield random programs, the same ones each time."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    from tests import random_programs

    drawn: list[Any] = []

    @seed(0)
    @settings(
        max_examples=RANDOM,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(random_programs.programs())
    def draw(steps: Any) -> None:
        drawn.append(steps)

    draw()
    for number, steps in enumerate(drawn):
        yield f"random/{number}", random_programs.program(steps), random_programs.arguments()


def _text(make: Callable[[], Any]) -> str:
    """Return the letters of something, or the first line of why there is none."""
    try:
        text = str(make())
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return hashlib.sha256(_ADDRESS.sub("", text).encode()).hexdigest()[:16]


def letters(fn: Any, args: Any, order: str, policy: PrecisionPolicy) -> dict[str, str]:
    """Return the hashes of one case."""
    try:
        run, given = TRANSFORMS[order].build(lambda f: amp(f, policy), fn, args)
    except (TypeError, ValueError) as error:  # nothing to differentiate
        return {"program": type(error).__name__}
    found = {"program": _text(lambda: _traced(run, given))}
    if order == "amp_of_grad":
        found["plan"] = _text(lambda: _plan(run, given))
    return found


def _traced(run: Any, given: Any) -> Any:
    """Return the rewritten program; what is not an array is a constant, as a call has it."""
    leaves, tree = jax.tree.flatten(given)
    kinds = np.ndarray, jax.Array, jax.ShapeDtypeStruct
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, kinds)}

    def of_arrays(arrays: dict[int, Any]) -> Any:
        return run(*jax.tree.unflatten(tree, (dict(enumerate(leaves)) | arrays).values()))

    return jax.make_jaxpr(of_arrays)(arrays)


def _plan(run: Any, given: Any) -> str:
    plan = plan_of(run)(*given)
    fields = [(d.plan.reads, d.outputs, d.plan.hints, d.accumulation) for d in plan.decisions()]
    return f"{plan}\n{fields}"


def save(path: Path, only: str, every: int) -> None:
    """Write the hashes of all cases, or of each program in so many."""
    found: dict[str, str] = {}
    warnings.simplefilter("ignore")
    for number, (name, fn, args) in enumerate(programs()):
        if only not in name or number % every:
            continue
        try:
            split_floats(args)
            orders: tuple[str, ...] = ORDERS
        except TypeError:
            orders = ORDERS[:1]
        for order in orders:
            for word, policy in POLICIES.items():
                if ("fused" in word) > ("attention" in name or "models" in name):
                    continue
                for what, text in letters(fn, args, order, policy).items():
                    found[f"{name} | {order} | {word} | {what}"] = text
    path.write_text(json.dumps(found, indent=1))
    print(f"{len(found)} texts")


def compare(before: Path, after: Path) -> int:
    """Print which texts differ, and how many are equal; return how many are not."""
    first, second = json.loads(before.read_text()), json.loads(after.read_text())
    moved = [name for name in sorted({*first, *second}) if first.get(name) != second.get(name)]
    for name in moved:
        print("moved:", name)
    print(f"{len({*first, *second}) - len(moved)} of {len({*first, *second})} texts are equal")
    return len(moved)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # parameters that are sets print in any order
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.letters", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("save", "compare"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="programs with this in their name")
    parser.add_argument("--every", type=int, default=1, help="one program in so many")
    chosen = parser.parse_args()
    if chosen.what == "save":
        save(chosen.files[0], chosen.only, chosen.every)
    else:
        sys.exit(compare(*chosen.files) > 0)
