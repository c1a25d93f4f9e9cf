"""Count what a loss sends between eight absent chips, where their compiler is installed.

python -m tests.found.cross_entropy.absent {h200,v5e} FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.collectives.count import collectives
from benchmarks.collectives.inside import TOPOLOGIES
from jaxamp import PrecisionPolicy, amp
from jaxamp.compiled import hlo
from jaxamp.compiled.compiler import absent_devices
from jaxamp.compiled.targets import TARGETS

BATCH, LENGTH, WIDTH, WORDS = 16, 1024, 512, 32768
MESHES = {
    "data": ((8, 1), P(), P()),
    "FSDP": ((8, 1), P("x"), P("x")),
    "FSDP and words": ((4, 2), P("x", "y"), P("x", "y")),
}
"""The shape of a mesh of x and y, and how a layer and the head are divided over it."""


def _loss(params: Any, x: Any, labels: Any) -> Any:
    x = x + jax.nn.gelu(x @ params["layer"])
    logits = x @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main(target: str, file: str) -> None:
    """Write a line of JSON for each mesh and order of `amp` and `grad`."""
    chip = TARGETS[target]
    devices = np.array(absent_devices(chip.platform, TOPOLOGIES[target][8], chip.description))
    with chip.described(), Path(file).open("w") as out:
        for name, (shape, layer, head) in MESHES.items():
            mesh = Mesh(devices.reshape(shape), ("x", "y"))
            for order in ("grad(amp(f))", "amp(grad(f))"):
                words = {"stored": False, "chunks": "memory"}
                row = {w: _counted(order, given, mesh, layer, head) for w, given in words.items()}
                out.write(json.dumps({"mesh": name, "order": order, **row}) + "\n")


def _counted(order: str, word: Any, mesh: Mesh, layer: P, head: P) -> dict[str, int]:
    def placed(shape: tuple[int, ...], spec: P, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = {"layer": placed((WIDTH, WIDTH), layer), "head": placed((WIDTH, WORDS), head)}
    x = placed((BATCH, LENGTH, WIDTH), P("x"))
    labels = placed((BATCH, LENGTH), P("x"), jnp.int32)
    policy = PrecisionPolicy.MIXED_BF16.replace(loss_in_chunks=word)
    step = amp(jax.grad(_loss), policy)
    if order == "grad(amp(f))":
        step = jax.grad(amp(_loss, policy))
    divided = jax.tree.map(lambda array: array.sharding, params)
    compiled: Any = jax.jit(step, out_shardings=divided).lower(params, x, labels).compile()
    sent = sum(collectives(hlo.parse(compiled.as_text())).values())
    return {"sent": sent, "memory": compiled.memory_analysis().temp_size_in_bytes}


if __name__ == "__main__":
    main(*sys.argv[1:])
