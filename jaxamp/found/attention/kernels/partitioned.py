"""A kernel in a program that a compiler partitions: each device attends for its examples and heads.

The partitioner is told which axes may lie on several devices, and gathers all others before the
call. So what a program has placed in another way is moved, and nothing fails to compile. Queries
that lie on several devices stay there: each attends with the form that is written out, as no
kernel knows which of the queries its own are.

Where arrays lie is read from the partitioner's own words for it, the tiles of each array: a program
may have several meshes, or none.

See: ``custom_partitioning`` of JAX, which cuDNN's own call uses; that raises where queries and keys
are placed differently.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

from jaxamp.found.attention.kernels import composed
from jaxamp.found.attention.kernels.spec import AttentionSpec, Operands, operands_of
from jaxamp.kernels.jax_compat.kernel_lowering import tiles

Axes = str | tuple[str, ...] | None
"""Axes of a mesh that an axis of an array lies along."""


def mesh_of(tiles: np.ndarray | None) -> tuple[AbstractMesh, list[Axes]]:
    """Return a mesh, and the axes of it that an array lies along, for each of the array's.

    Tiles are numbers of the devices that have each tile of the array, int[*tiles, copies]; ``None``
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


Letters = tuple[str, ...]
"""A letter for each axis of an array.

"t" are queries, "s" keys, "n" heads of queries, "k" those of keys, "h" and "w" the size of a key
and of a value, "b0" … batch axes. An axis of size one of a bias has a letter of its own, "u0" ….
"""


def partitioned(
    form: Callable[..., Any], avals: Sequence[Any], spec: AttentionSpec, bias_grad: bool | None
) -> Any:
    """Return a pass of attention, of arrays on one device, as one that a compiler may partition.

    `bias_grad` is ``None`` for a forward pass.
    """
    partition = Partition(form, avals, spec, bias_grad)
    whole = functools.partial(partition.written_out, spec)
    call = custom_partitioning(jax.jit(whole))  # which has a mask's numbers, as JAX 0.10.2 demands
    call.def_partition(
        partition=lambda _mesh, shapes, _: partition.place(shapes),
        infer_sharding_from_operands=lambda _mesh, shapes, _: list(partition.place(shapes)[2]),
        decode_shardings=False,  # which would be with the one mesh of the program
        **_rule(partition),
    )
    return call


class Partition:
    """Division of a pass among devices: letters of its operands and results, and their sizes."""

    def __init__(
        self,
        form: Callable[..., Any],
        avals: Sequence[Any],
        spec: AttentionSpec,
        bias_grad: bool | None,
    ) -> None:
        self.form, self.spec, self.bias_grad = form, spec, bias_grad
        self.operands, self.results = self._letters(self._given(avals))
        self.sizes: dict[str, int] = {}
        for letters, aval in zip(self.operands, avals, strict=True):
            self.sizes.update(zip(letters, aval.shape, strict=True))

    def _given(self, values: Sequence[Any]) -> Operands:
        """Return what the pass reads, by name."""
        return operands_of(values, backward=self.bias_grad is not None)

    def _letters(self, given: Operands) -> tuple[list[Letters], list[Letters]]:
        """Return the letters of the operands, and those of the results."""
        batch = tuple(f"b{i}" for i in range(given.q.ndim - 3))
        q, k, v = (*batch, "t", "n", "h"), (*batch, "s", "k", "h"), (*batch, "s", "k", "w")
        out, rows = (*batch, "t", "n", "w"), (*batch, "n", "t")
        known: list[Letters] = [q, k, v]
        if given.bias is not None:
            axes = enumerate(zip((*batch, "n", "t", "s"), given.bias.shape, strict=True))
            known.append(tuple(x if n != 1 else f"u{i}" for i, (x, n) in axes))
        if self.bias_grad is None:
            return known, [out, rows]
        return [*known, out, rows, out], known[: 4 if self.bias_grad else 3]

    def written_out(self, spec: AttentionSpec, *values: Any) -> tuple[Any, ...]:
        """Compute the pass by JAX's operations."""
        if self.bias_grad is None:
            return composed.forward(*values, spec=spec)
        return composed.backward(*values, spec=spec, bias_grad=self.bias_grad)

    def place(self, shapes: Any) -> tuple[Any, ...]:
        """Return a mesh, the pass of one device, and where results and operands lie on it."""
        mesh, placed = self._placed(shapes[0].sharding)
        given, made = (
            tuple(_sharding(mesh, placed, letters) for letters in of)
            for of in (self.operands, self.results)
        )
        specs = [sharding.spec for sharding in given]

        def local(*values: Any) -> tuple[Any, ...]:
            with use_abstract_mesh(AbstractMesh((), ())):  # not the one that the compiler divides
                return self._local(values, placed, specs)

        return mesh, local, made, given

    def _placed(self, queries: Any) -> tuple[AbstractMesh, dict[str, Axes]]:
        """Return a mesh, and the axes of it that examples, heads and queries lie along."""
        letters = self.operands[0]
        mesh, axes = mesh_of(tiles(queries, len(letters)))
        placed = {x: a for x, a in zip(letters, axes, strict=False) if _is_free(x)}
        placed["k"] = placed.get("n")
        parts = {
            x: math.prod(mesh.shape[name] for name in jax.tree.leaves(a)) for x, a in placed.items()
        }
        return mesh, {x: a for x, a in placed.items() if self.sizes[x] % parts[x] == 0}

    def _local(
        self, values: Sequence[Any], placed: Mapping[str, Axes], specs: Sequence[PartitionSpec]
    ) -> tuple[Any, ...]:
        """Compute the part of one device, of its parts of operands that lie along such axes."""
        rows = tuple(jax.tree.leaves(placed.get("t")))
        found = [*(self._of_rows(values, rows) if rows else self.form(*values))]
        if self.bias_grad:  # a bias is broadcast along what is missing in its own axes
            every, own = (jax.tree.leaves(tuple(spec)) for spec in (specs[0], specs[3]))
            axes = tuple(a for a in every if a not in own)
            found[3] = lax.psum(found[3], axes) if axes else found[3]
        return tuple(found)

    def _of_rows(self, values: Sequence[Any], names: tuple[str, ...]) -> tuple[Any, ...]:
        """Compute the pass of a part of the queries, which lie along some axes of a mesh."""
        operands = self._given(values)
        q, k, _, bias, *_ = operands
        rows, seen, masked = q.shape[-3], self.spec.seen(self.sizes["t"], k.shape[-3]), bias
        if seen is not None:
            mine = lax.dynamic_slice_in_dim(seen, lax.axis_index(names) * rows, rows)
            mine = mine.reshape((1,) * (q.ndim - 2) + mine.shape)
            masked = jnp.where(mine, 0.0 if bias is None else bias, -jnp.inf)
        given = operands._replace(bias=masked).given
        found = self.written_out(AttentionSpec(self.spec.scale), *given)
        if self.bias_grad is None:
            return found
        dq, dk, dv, *dbias = found
        more = (composed.sum_to(x, bias) for x in dbias)
        return (dq, lax.psum(dk, names), lax.psum(dv, names), *more)


def _sharding(mesh: AbstractMesh, placed: Mapping[str, Axes], letters: Letters) -> NamedSharding:
    """Return where an array lies; heads of queries and keys are divided together or not at all."""
    together = placed if {"n", "k"} <= placed.keys() else {**placed, "n": None, "k": None}
    return NamedSharding(mesh, PartitionSpec(*map(together.get, letters)))


def _rule(partition: Partition) -> dict[str, Any]:
    """Return what Shardy is told: the axes of each array in words, and which must be whole.

    "n" heads of queries are "k" heads of keys times "g" queries that share one.
    """
    sizes = partition.sizes
    groups = sizes["n"] // sizes["k"]
    is_split = groups > 1 < sizes["k"]
    heads = "(k g)" if is_split else "g" if groups > 1 else "k"

    def side(arrays: Sequence[Letters]) -> str:
        words = (" ".join(heads if x == "n" else x for x in letters) for letters in arrays)
        return ", ".join(words)

    rule: dict[str, Any] = {"g": groups} if is_split else {}
    rule["sharding_rule"] = f"{side(partition.operands)} -> {side(partition.results)}"
    rule["need_replication_factors"] = tuple(
        "g" if x == "n" else x
        for x in sizes
        if (groups > 1 if x == "n" else x != "k" and not _is_free(x))
    )
    return rule


def _is_free(letter: str) -> bool:
    """Return whether an axis may lie along axes of a mesh."""
    return letter in ("n", "t") or letter.startswith("b")
