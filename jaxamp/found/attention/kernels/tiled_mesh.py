"""A mesh read from where a partitioner puts the tiles of an array.

A program may have several meshes, or none: only the partitioner's own words say where arrays lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh

Axes = str | tuple[str, ...] | None
"""Axes of a mesh that an axis of an array lies along."""


def divided(form: Callable[..., Any], place: Callable[[Any], tuple[Any, ...]], **rule: Any) -> Any:
    """Return a function that a compiler may partition, each device computing a part.

    Args:
      form: the function, of which JAX takes the types of results.
      place: returns from the types of operands, as they are placed, a mesh, the function of one
        device, and where results and operands lie on the mesh.
      **rule: what Shardy is told.
    """

    def partition(_mesh: Any, shapes: Any, _: Any) -> tuple[Any, ...]:
        mesh, part, *lies = place(shapes)

        def alone(*operands: Any) -> Any:
            with use_abstract_mesh(AbstractMesh((), ())):  # not the one that the compiler divides
                return part(*operands)

        return mesh, alone, *lies

    call = custom_partitioning(form)
    call.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda _mesh, shapes, _: list(place(shapes)[2]),
        decode_shardings=False,  # which would be with the one mesh of the program
        **rule,
    )
    return call


def mesh_of(tiles: np.ndarray | None) -> tuple[AbstractMesh, list[Axes]]:
    """Return a mesh, and the axes of it that an array lies along, for each of the array's.

    Args:
      tiles: numbers of the devices that have each tile of the array, int[*tiles, copies]; ``None``
        for an array that every device has. So is one whose tiles lie along no mesh's axes.

    >>> mesh_of(np.arange(8).reshape(4, 2).T[..., None])  # over the second axis, then the first
    (AbstractMesh('m0': 4, 'm1': 2, axis_types=(Auto, Auto)), [('m1',), ('m0',), None])
    """
    if tiles is None:
        return _ALONE, []
    first = np.unravel_index(0, tiles.shape)
    steps = [_steps(tiles[(*first[:i], slice(None), *first[i + 1 :])]) for i in range(tiles.ndim)]
    order = sorted((step for line in steps for step in line), reverse=True)
    names = {step: f"m{i}" for i, step in enumerate(order)}
    sizes = tuple(size for _, size in order)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    moved = numbers.transpose([order.index(step) for line in steps for step in line])
    if not np.array_equal(moved.ravel(), tiles.ravel()):
        return _ALONE, []
    return _mesh(sizes, tuple(names.values())), [
        tuple(names[step] for step in line) or None for line in steps
    ]


def _mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> AbstractMesh:
    """Return a mesh whose axes are automatic, as those of JAX 0.12 are by default no longer."""
    return AbstractMesh(sizes, names, (AxisType.Auto,) * len(sizes))


_ALONE = _mesh((1,), ("m0",))


def _steps(line: np.ndarray) -> list[tuple[int, int]]:
    """Return steps between the numbers along one axis, each with how often it is made."""
    if len(line) == 1:
        return []
    step = int(line[1] - line[0])
    run = next((i for i in range(len(line)) if line[i] - line[0] != i * step), len(line))
    return [*_steps(line[::run]), (step, run)]


def names_of(axes: Any) -> Iterator[str]:
    """Yield the axes of a mesh in a spec, or in an entry of one."""
    if isinstance(axes, str):
        yield axes
    elif axes is not None:
        for entry in axes:
            yield from names_of(entry)


def parts(mesh: AbstractMesh, axes: Axes) -> int:
    """Return how many parts an axis is divided into."""
    return math.prod(mesh.shape[a] for a in names_of(axes))
