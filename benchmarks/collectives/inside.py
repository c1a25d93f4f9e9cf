"""Compile and count where the TPU's compiler is; ``python -m benchmarks.collectives`` starts it."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks.collectives import programs
from benchmarks.collectives.count import collectives
from jaxamp import PrecisionPolicy, amp
from jaxamp.compiled import hlo
from jaxamp.compiled.targets import TARGETS


def same(fn):
    """Leaves a function as it is."""
    return fn


SUMS_LOW = PrecisionPolicy.AUTO_MIXED_BF16.replace(allreduce="bf16")
VARIANTS = {
    "f32": (same, same, "highest"),
    "f32, TPU default": (same, same, None),
    "grad(amp)": (amp, same, None),
    "amp(grad)": (same, amp, None),
    "amp(grad), bf16 sums": (same, partial(amp, policy=SUMS_LOW), None),
}
"""What is done to the loss before it is differentiated, and to the whole step; and JAX's default
precision of matrix products, without which a TPU computes those of float32 in bfloat16."""


def mesh_of(target: str) -> Mesh:
    """Four absent devices, two by two."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TARGETS[target].topology)
    return Mesh(np.array(topology.devices).reshape(2, 2), ("x", "y"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--dump", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    mesh, size = mesh_of(options.target), programs.Size()
    params = jax.eval_shape(partial(programs.init, size), jax.random.key(0))
    words = jax.eval_shape(partial(programs.sample, size), jax.random.key(0))
    for style, make in programs.STYLES.items():
        for strategy in programs.SPLITS:
            split, rows = programs.shardings(strategy, mesh)
            placed = jax.tree.map(
                lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
                (params, words),
                (split, rows),
            )
            for variant, (loss_in, step_in, products) in VARIANTS.items():
                name = f"{style} {strategy} {variant}"
                if options.only not in name:
                    continue
                with jax.default_matmul_precision(products):
                    lowered = make(size, strategy, mesh, loss_in, step_in).lower(*placed)
                compiled = lowered.compile()
                text = compiled.as_text()
                if options.dump:
                    options.dump.mkdir(parents=True, exist_ok=True)
                    (options.dump / f"{name.replace(' ', '-')}.hlo").write_text(text)
                found = collectives(hlo.parse(text))
                row = {
                    "target": options.target,
                    "style": style,
                    "strategy": strategy,
                    "variant": variant,
                    "bytes": [[*key, count] for key, count in sorted(found.items())],
                }
                with options.json.open("a") as out:
                    out.write(json.dumps(row) + "\n")
                print(name, dict(found), flush=True)


if __name__ == "__main__":
    main()
