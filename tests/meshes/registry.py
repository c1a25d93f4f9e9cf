"""What a program over a mesh is, and the list that all of them join."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.programs.registry import Draw, enter

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = {"auto": (AUTO, AUTO), "explicit": (EXPLICIT, EXPLICIT), "mixed": (AUTO, EXPLICIT)}
"""Types of the axes `d` and `m` of a mesh; a third type, Manual, is that of a ``shard_map``."""

SHAPE, AXES = (2, 4), ("d", "m")
ROWS, WIDTH, WHOLE = 8, 16, P()


@dataclasses.dataclass(frozen=True)
class MeshProgram:
    """A float32 program of `x` [8, 16], `w` and `v` [16, 16] over a mesh of 2 x 4 devices.

    Attributes:
        name: the function's name, unique.
        fn: the program, a pure function of the three, to be called under its mesh.
        kind: one of `KINDS`.
        specs: where the three lie.
        tolerance: a row of `tests.tolerances.CLASSES`.
    """

    name: str
    fn: Callable[..., Any]
    kind: str
    specs: tuple[P, P, P]
    tolerance: str

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """Its mesh."""
        return jax.make_mesh(SHAPE, AXES, axis_types=KINDS[self.kind])

    def args(self) -> tuple[jax.Array, ...]:
        """Its arguments, as they lie on the mesh."""
        draw = Draw(self.name)
        numbers = draw.normal(ROWS, WIDTH), draw.weight(WIDTH, WIDTH), draw.weight(WIDTH, WIDTH)
        return tuple(map(self._placed, numbers, self.specs))

    def _placed(self, x: np.ndarray, spec: P) -> jax.Array:
        return jax.device_put(x, NamedSharding(self.mesh, spec))


MESH_PROGRAMS: dict[str, MeshProgram] = {}


def program(
    kind: str, x: P = WHOLE, w: P = WHOLE, v: P = WHOLE, *, tolerance: str = "dot"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the decorated function into `MESH_PROGRAMS`; for the arguments see `MeshProgram`."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        entry = MeshProgram(fn.__name__, fn, kind, (x, w, v), tolerance)
        enter(MESH_PROGRAMS, fn.__name__, entry)
        return fn

    return decorate
