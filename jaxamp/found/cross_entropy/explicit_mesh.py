"""Chunks of arrays whose types say where they lie.

On an explicit mesh a program says how each result of all tokens is divided. A chunk is computed as
on a mesh of which XLA chooses that, and what the program reads of it lies where its type says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import AxisType, PartitionSpec, reshard, use_abstract_mesh

from jaxamp.core import jax_compat

Emitted = Callable[[Callable[[int], Any]], Mapping[int, Any]]
"""Computes values of a program, of what reads one."""


def as_typed(emitted: Emitted, logits: Any, avals: Sequence[Any]) -> Emitted:
    """Return what computes the same as on other meshes where the type of logits says how they lie.

    Types are those of the logits of all tokens, and of all values of the program.
    """
    if not jax_compat.has_typed_sharding(logits):
        return emitted
    mesh = logits.sharding.mesh
    axes = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = [name for name, kind in axes.items() if kind is AxisType.Explicit]
    automatic = mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto))

    def each(read: Callable[[int], Any]) -> Mapping[int, Any]:
        with use_abstract_mesh(automatic):  # in it, this changes a type and moves nothing
            found = emitted(lambda value: reshard(read(value), PartitionSpec()))
        with use_abstract_mesh(mesh):
            return {value: reshard(x, avals[value].sharding) for value, x in found.items()}

    return each
