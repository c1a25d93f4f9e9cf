"""Measure what each technique of steering XLA is worth, on chips that are not there.

    python -m benchmarks.deviceless --install gpu        the compiler for NVIDIA, once
    python -m benchmarks.deviceless --install tpu        the compiler for TPU, once
    python -m benchmarks.techniques --target h200        measure, and write the table into the docs
    python -m benchmarks.techniques --target v5e --model resnet50 vit
    python -m benchmarks.techniques --target h200 --small --page out/table.md

The value and gradient of each model are compiled in both orders with all techniques, with none, and
with all but one. Programs are known by what they are lowered to: one that has been compiled before,
in this run or in one that was cut off, is not compiled again. A JSON file keeps all figures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import jax
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.deviceless.models import EVERY, MODELS
from benchmarks.deviceless.models.model import Size
from benchmarks.deviceless.variants import ORDERS, POLICY
from jaxamp import PrecisionPolicy, amp
from jaxamp.compiled import hlo, traffic
from jaxamp.compiled.deviceless import ENVIRONMENTS
from jaxamp.compiled.targets import TARGETS, Target, compile_for
from jaxamp.errors import JaxAmpError
from jaxamp.xla.hints.techniques import ALL_TECHNIQUES, Technique

PAGE = Path("docs/lab-notebook.md")
FIGURES = {"bytes": "Bytes moved", "temporary": "Temporary memory", "kernels": "Kernels"}
NONE = "none of them"
VARIANTS: dict[str, frozenset[Technique]] = {
    "all": ALL_TECHNIQUES,
    NONE: frozenset(),
    **{technique.value: ALL_TECHNIQUES - {technique} for technique in Technique},
}
"""By name, the techniques that are on; that of a technique is all but this one."""

Figures = dict[str, Any]
Row = tuple[str, str]
"""A model and an order."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.techniques",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--model", nargs="+", default=[*MODELS], choices=EVERY)
    parser.add_argument("--only", nargs="+", default=[*VARIANTS], choices=VARIANTS)
    parser.add_argument("--small", action="store_true", help="toy sizes, to try the command")
    parser.add_argument("--json", type=Path, help="where the figures are kept (default: out/)")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the table is written")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    size = "-small" if options.small else ""
    path = options.json or Path("out") / f"techniques-{options.target}{size}.json"
    target = TARGETS[options.target]
    if options.inside:
        measure(target, options.model, options.only, path, small=options.small)
        return 0
    try:
        ENVIRONMENTS[target.environment].run(
            *("-m", "benchmarks.techniques", "--inside", "--target", target.name),
            *("--model", *options.model, "--only", *options.only, "--json", str(path)),
            *(("--small",) if options.small else ()),
        )
    finally:  # what was measured before a failure is shown
        if path.exists():
            write(options.page, target.name, described(target, json.loads(path.read_text())))
    return 0


def programs(size: Size, xla: frozenset[Technique]) -> dict[str, Callable[..., Any]]:
    """Return the value and gradient of a model in both orders, under the techniques that are on."""
    policy = PrecisionPolicy.parse(POLICY).replace(xla=xla)

    def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.value_and_grad(fn, has_aux=True)

    built = gradient(amp(size.plain, policy)), amp(gradient(size.plain), policy)
    return dict(zip(ORDERS, built, strict=True))


def shapes(size: Size) -> tuple[Any, Any]:
    """Return the parameters and the batch of a model, as shapes."""
    key = jax.random.key(0)
    return jax.eval_shape(size.init, key), jax.eval_shape(size.sample, key)


def digest(target: Target, fn: Callable[..., Any], args: Any) -> str:
    """Return what tells a program from others: a hash of what a compiler is given."""
    lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=(target.platform,))
    text = lowered.as_text()
    return hashlib.sha256(f"jax {jax.__version__}\n{text}".encode()).hexdigest()[:16]


def measure(
    target: Target, models: Sequence[str], variants: Sequence[str], path: Path, *, small: bool
) -> None:
    """Compile what has not been compiled yet; write the figures after each program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(path.read_text()) if path.exists() else {"programs": {}, "rows": []}
    rows = {tuple(row[:3]): row[3] for row in found["rows"]}
    with _progress() as progress:
        task = progress.add_task("", total=2 * len(models) * len(variants))
        for model, order, variant, fn, args in _jobs(models, variants, small=small):
            progress.update(task, description=f"{model}, {order}, without {variant}")
            program = digest(target, fn, args)
            if program not in found["programs"]:
                found["programs"][program] = figures(target, fn, args)
            rows[model, order, variant] = program
            found |= {"rows": [[*key, value] for key, value in rows.items()]}
            found |= {"jax": jax.__version__, "date": str(date.today())}
            path.write_text(json.dumps(found, indent=1) + "\n")
            progress.advance(task)


def _jobs(
    models: Sequence[str], variants: Sequence[str], *, small: bool
) -> Iterator[tuple[str, str, str, Callable[..., Any], Any]]:
    for model in models:
        size = EVERY[model].small if small else EVERY[model].full
        args = shapes(size)
        for variant in variants:
            for order, fn in programs(size, VARIANTS[variant]).items():
                yield model, order, variant, fn, args


def figures(target: Target, fn: Callable[..., Any], args: Any) -> Figures:
    """Return what a program moves, needs and launches when it is compiled for a chip."""
    compiled = compile_for(target, fn, args)
    counted = asdict(traffic.measure(hlo.parse(compiled.as_text())))
    counted["temporary"] = compiled.memory_analysis().temp_size_in_bytes
    return {figure: counted[figure] for figure in FIGURES}


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, TimeElapsedColumn())


def ratios(found: dict[str, Any]) -> dict[str, dict[Row, Figures | None]]:
    """Return, by variant, each figure of each row as a ratio to that with all techniques on.

    ``None`` stands for a program that is the same to the letter.
    """
    compiled = found["programs"]
    rows = {(model, order, variant): program for model, order, variant, program in found["rows"]}
    by_variant: dict[str, dict[Row, Figures | None]] = {}
    for (model, order, variant), program in rows.items():
        base = rows.get((model, order, "all"))
        if variant == "all" or base is None:
            continue
        ratio = {
            figure: compiled[program][figure] / max(compiled[base][figure], 1) for figure in FIGURES
        }
        of_variant = by_variant.setdefault(variant, {})
        of_variant[model, order] = None if program == base else ratio
    return by_variant


def described(target: Target, found: dict[str, Any]) -> str:
    """Return the table of a chip as Markdown: bytes and memory in each cell."""
    by_variant = ratios(found)
    rows = [*dict.fromkeys(row for of_variant in by_variant.values() for row in of_variant)]
    day = date.fromisoformat(found["date"])
    parts = [
        f"{target.title}, JAX {found['jax']}, {day.day} {day:%B %Y}, "
        f"`python -m benchmarks.techniques --target {target.name}`:",
    ]
    lines = [
        "| without | " + " | ".join(f"{m}, `{order}`" for m, order in rows) + " |",
        "|---" * (len(rows) + 1) + "|",
    ]
    for variant in filter(by_variant.__contains__, VARIANTS):
        cells = [_cell(by_variant[variant], row) for row in rows]
        if {*cells} != {"·"}:
            lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    parts.append("\n".join(lines))
    if missing := [model for model in MODELS if model not in {model for model, _ in rows}]:
        parts.append(f"Not measured: {', '.join(missing)}.")
    return "\n\n".join(parts) + "\n"


def _cell(found: dict[Row, Figures | None], row: Row) -> str:
    """Return bytes / memory; a dot where nothing changes, to a hundredth."""
    if row not in found:
        return "–"
    shown = (
        [f"{ratio[figure]:.2f}" for figure in ("bytes", "temporary")]
        if (ratio := found[row])
        else []
    )
    return "·" if {*shown} <= {"1.00"} else " / ".join(shown)


def write(page: Path, name: str, text: str) -> None:
    """Write text between the markers of a name; a page without them gets both at its end."""
    start, end = f"<!-- techniques {name} -->", f"<!-- end of techniques {name} -->"
    whole = page.read_text() if page.exists() else ""
    if start not in whole:
        whole += f"\n{start}\n{end}\n"
    before, rest = whole.split(start)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(f"{before}{start}\n\n{text}\n{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except JaxAmpError as error:
        raise SystemExit(str(error)) from None
