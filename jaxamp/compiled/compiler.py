"""Compiles for a chip that is not there. Run by path where a vendor's compiler is; needs only JAX.

python compiler.py FOLDER: reads FOLDER/job.json and the programs that it names, and writes the
optimized text and the facts of each beside it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# XLA takes the fastest of its own kernels for a product and a library's. Where it can time none its
# first choice may not fit the chip: "Shared memory size limit exceeded", "Couldn't find output tile
# sizes" (JAX 0.10.2).
_LIBRARIES = {"xla_gpu_enable_triton_gemm": False}


def absent_devices(platform: str, topology: str, description: str) -> list[Any]:
    """Return devices that are not there; of a GPU, a description that its driver would give."""
    options = {"target_config": description} if description else {}
    name = "" if platform == "cuda" else topology
    if platform == "cuda":
        options["topology"] = topology
    return topologies.get_topology_desc(platform=platform, topology_name=name, **options).devices


def one_device(platform: str, topology: str, description: str) -> NamedSharding:
    """Return the sharding that puts an array on one absent device."""
    device = absent_devices(platform, topology, description)[:1]
    return NamedSharding(Mesh(np.array(device), ("x",)), PartitionSpec())


def compile_on(
    place: NamedSharding, fn: Any, args: Any, options: dict[str, Any] | None = None
) -> Any:
    """Return the compiled program of a function of arrays, which types stand for."""
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), args)
    lowered = jax.jit(fn).lower(*placed)
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError:
        if next(iter(place.device_set)).platform == "tpu":
            raise
        return lowered.compile({**(options or {}), **_LIBRARIES})


def facts(compiled: Any) -> dict[str, Any]:
    """Return the compiler's own analysis of a program's memory."""
    memory = compiled.memory_analysis()
    return {
        "temporary": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
    }


def main(folder: Path) -> None:
    """Compile every program of a job."""
    job = json.loads((folder / "job.json").read_text())
    if job["platform"] == "cuda":
        # XLA looks among the process's symbols for what Mosaic's kernels for GPUs call. Without it:
        # "Failed to lookup host symbol: … body_mosaic_gpu" (JAX 0.10.2).
        with contextlib.suppress(ModuleNotFoundError):  # absl-py, which JAX does not declare
            importlib.import_module("jax.experimental.mosaic.gpu")
    place = one_device(job["platform"], job["topology"], job["description"])
    for name in job["programs"]:
        exported = jax.export.deserialize(bytearray((folder / f"{name}.bin").read_bytes()))
        compiled = compile_on(place, exported.call, exported.in_avals, job["options"])
        (folder / f"{name}.hlo").write_text(compiled.as_text())
        (folder / f"{name}.json").write_text(json.dumps(facts(compiled)))


if __name__ == "__main__":
    import jax.export

    main(Path(sys.argv[1]))
