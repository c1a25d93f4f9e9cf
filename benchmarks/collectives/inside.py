"""Compile and count where a vendor's compiler is, for ``python -m benchmarks.collectives``."""

from __future__ import annotations

import argparse
import json
from functools import partial
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.collectives import programs
from benchmarks.collectives.count import collectives
from jaxamp import PrecisionPolicy, amp
from jaxamp.compiled import hlo
from jaxamp.compiled.compiler import absent_devices
from jaxamp.compiled.targets import TARGETS


def same(fn):
    """Leaves a function as it is."""
    return fn


def by_hand(loss):
    """Computes in bfloat16: what the parameters are cast to before anything else."""
    return lambda params, words: loss(jax.tree.map(lambda p: p.astype(jnp.bfloat16), params), words)


SUMS_LOW = PrecisionPolicy.AUTO_MIXED_BF16.replace(allreduce="bf16")
VARIANTS = {
    "by hand": (by_hand, same, None),
    "f32": (same, same, "highest"),
    "f32, TPU default": (same, same, None),
    "grad(amp)": (amp, same, None),
    "amp(grad)": (same, amp, None),
    "amp(grad), bf16 sums": (same, partial(amp, policy=SUMS_LOW), None),
}
"""What is done to the loss before it is differentiated, and to the whole step; and JAX's default
precision of matrix products, without which a TPU computes those of float32 in bfloat16."""


TOPOLOGIES = {"v5e": {4: "v5e:2x2", 8: "v5e:2x4"}, "h200": {4: "1x1x4", 8: "1x1x8"}}
"""What compilers call so many devices: chips of a slice, or GPUs of one host."""


def mesh_of(target: str, style: str, strategy: str) -> Mesh:
    """Absent devices with the axes x and y."""
    found, shape = TARGETS[target], programs.MESHES[strategy]
    name = TOPOLOGIES[target][prod(shape)]
    devices = absent_devices(found.platform, name, found.description)
    types = (programs.AXIS_TYPES[style],) * 2
    return Mesh(np.array(devices).reshape(shape), ("x", "y"), axis_types=types)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--dump", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--unrolled", action="store_true")
    options = parser.parse_args()
    size = programs.Size(unrolled=options.unrolled)
    params = jax.eval_shape(partial(programs.init, size), jax.random.key(0))
    words = jax.eval_shape(partial(programs.sample, size), jax.random.key(0))
    for style, make in programs.STYLES.items():
        for strategy in programs.SPLITS:
            mesh = mesh_of(options.target, style, strategy)
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
                described = TARGETS[options.target].described()
                with described, jax.default_matmul_precision(products):
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
