"""Compile cases for eight absent chips, where their compiler is installed.

python -m tests.meshes.absent {v5e,h200} FOLDER CASE...
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from benchmarks.collectives.inside import TOPOLOGIES
from jaxamp import amp
from jaxamp.compiled.compiler import absent_devices
from jaxamp.compiled.targets import TARGETS
from tests.meshes.checks import MeshCase, ordered, policy_of
from tests.meshes.registry import AXES, KINDS, MESH_PROGRAMS, ROWS, SHAPE, WIDTH

Wrapper = Callable[[Any], Any]


def main(target: str, folder: str, *names: str) -> None:
    """Write what the compiler says of each case into a file of its name, nothing if it compiles."""
    chip = TARGETS[target]
    devices = absent_devices(chip.platform, TOPOLOGIES[target][8], chip.description)
    mesh = np.array(devices).reshape(SHAPE)
    warnings.simplefilter("ignore")
    with chip.described():
        for name in names:
            said = _said(mesh, MeshCase(*name.split("-")))
            (Path(folder) / name).write_text(said)


def _said(devices: Any, case: MeshCase) -> str:
    """Return why a case does not compile, though its program does in float32."""
    program, policy = MESH_PROGRAMS[case.program], policy_of(case.policy)
    mesh = Mesh(devices, AXES, axis_types=KINDS[program.kind])
    shapes = (ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH)
    args = [
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, program.specs, strict=True)
    ]

    def compiled(wrap: Wrapper) -> None:
        jax.jit(ordered(case.order, wrap, program.fn)).lower(*args).compile()

    with jax.set_mesh(mesh):
        try:
            compiled(lambda fn: amp(fn, policy))
        except Exception as error:  # whatever a compiler says
            return _unless_in_float32(error, compiled)
    return ""


def _unless_in_float32(error: Exception, compiled: Callable[[Wrapper], None]) -> str:
    try:
        compiled(lambda fn: fn)
    except Exception:
        return ""
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(*sys.argv[1:])
