"""Compile and count inside a target's environment; `python -m benchmarks.deviceless` starts it."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from benchmarks.deviceless import diagnosis
from benchmarks.deviceless.models import EVERY, fused
from benchmarks.deviceless.models.model import HAND, Model
from benchmarks.deviceless.variants import variants
from jaxamp.compiled import hlo, traffic
from jaxamp.compiled.targets import TARGETS, Target, compile_for


def measure(
    target: Target, model: Model, variant: str, dump: Path | None
) -> tuple[dict[str, Any], hlo.Module]:
    """The figures of one compiled program, and the program."""
    size = model.full
    params = jax.eval_shape(size.init, jax.random.key(0))
    batch = jax.eval_shape(size.sample, jax.random.key(0))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True} if dump else None
        with fused.on(target.platform):
            compiled = compile_for(target, variants(size)[variant], (params, batch), options)
        live_ranges = diagnosis.live_ranges_in(Path(folder))
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    module = hlo.parse(text)
    if dump:
        dump.mkdir(parents=True, exist_ok=True)
        name = f"{target.name}-{model.name}-{_file_name(variant)}"
        (dump / f"{name}.hlo").write_text(text)
        (dump / f"{name}.txt").write_text(diagnosis.report(module, live_ranges))
    cost = compiled.cost_analysis() or {}
    figures = asdict(traffic.measure(module)) | {
        "temporary": compiled.memory_analysis().temp_size_in_bytes,
        "accessed": cost.get("bytes accessed"),
        "seconds": round(seconds, 1),
    }
    return figures, module


def _file_name(variant: str) -> str:
    return re.sub(r"\W+", "-", variant).strip("-")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--variants", nargs="*")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--dump", type=Path)
    options = parser.parse_args()
    target = TARGETS[options.target]
    for name in options.models:
        modules = {}
        for variant in options.variants or variants(EVERY[name].full):
            figures, module = measure(target, EVERY[name], variant, options.dump)
            modules[variant] = module
            row = {"target": target.name, "model": name, "variant": variant} | figures
            with options.json.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print(f"{name}, {variant}: {figures['seconds']} s", flush=True)
        if options.dump and HAND in modules:
            for variant, module in modules.items():
                if variant != HAND:
                    path = options.dump / f"{target.name}-{name}-{_file_name(variant)}.vs-hand.txt"
                    path.write_text(diagnosis.compare(module, modules[HAND]) + "\n")


if __name__ == "__main__":
    main()
