"""A kernel in a program that a compiler partitions: each device attends for its examples and heads.

The partitioner is told which axes may lie on several devices, and gathers all others before the
call. So what a program has placed in another way is moved, and nothing fails to compile. Queries
that lie on several devices stay there: each attends with the form that is written out, as no
kernel knows which of the queries its own are.

See: ``custom_partitioning`` of JAX, which cuDNN's own call uses; that raises where queries and keys
are placed differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxamp.kernels.attention import composed
from jaxamp.kernels.attention.spec import AttentionSpec

Letters = tuple[str, ...]

_WITH_BIAS = (4, 7)  # operands of a forward and of a backward pass


def partitioned(
    form: Callable[..., Any], avals: Sequence[Any], spec: AttentionSpec, bias_grad: bool | None
) -> Any:
    """Return a pass of attention as a function that a compiler may partition.

    Args:
      form: the pass, of arrays on one device.
      avals: types of its operands.
      spec: the static parameters.
      bias_grad: whether a backward pass has the cotangent of a bias; ``None`` for a forward pass.
    """
    operands, results = _letters(avals, bias_grad)
    sizes: dict[str, int] = {}
    for letters, aval in zip(operands, avals, strict=True):
        sizes.update(zip(letters, aval.shape, strict=True))

    def split(shapes: Any) -> dict[str, Any]:
        """Return the axes of the mesh that examples and heads lie along, as queries do."""
        given = shapes[0].sharding
        names = [*getattr(given, "spec", ()), *(None for _ in operands[0])]
        placed = {x: axes for x, axes in zip(operands[0], names, strict=False) if _is_free(x)}
        placed["k"] = placed["n"]
        return {x: axes for x, axes in placed.items() if sizes[x] % _count(given, axes) == 0}

    def sharding(mesh: Mesh, placed: dict[str, Any], letters: Letters) -> NamedSharding:
        both = placed if {"n", "k"} <= placed.keys() else {**placed, "n": None, "k": None}
        return NamedSharding(mesh, PartitionSpec(*map(both.get, letters)))

    def infer(mesh: Mesh, shapes: Any, _: Any) -> Any:
        placed = split(shapes)
        return [sharding(mesh, placed, letters) for letters in results]

    def partition(mesh: Mesh, shapes: Any, _: Any) -> Any:
        placed = split(shapes)
        given = [sharding(mesh, placed, letters) for letters in operands]
        spread = {*_names(given[0].spec)}

        def local(*xs: Any) -> Any:
            rows = tuple(_names(placed.get("t")))
            found = list(_of_rows(xs, rows, sizes["t"], spec, bias_grad) if rows else form(*xs))
            if bias_grad:  # a bias is broadcast along what is missing in its own axes
                axes = tuple(a for a in spread if a not in _names(given[3].spec))
                found[3] = lax.psum(found[3], axes) if axes else found[3]
            return tuple(found)

        return mesh, local, tuple(sharding(mesh, placed, x) for x in results), tuple(given)

    call = custom_partitioning(lambda *xs: _written_out(xs, spec, bias_grad))  # it has the types
    groups = sizes["n"] // sizes["k"]
    is_split = groups > 1 < sizes["k"]
    words = {"n": "(k g)" if is_split else "g" if groups > 1 else "k"}

    def side(rows: list[Letters]) -> str:
        return ", ".join(" ".join(words.get(x, x) for x in letters) for letters in rows)

    counts: dict[str, Any] = {"g": groups} if is_split else {}
    whole = ["g" if x == "n" else x for x in sizes if x == "n" or not _is_free(x)]
    call.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=f"{side(operands)} -> {side(results)}",
        need_replication_factors=tuple(x for x in whole if x != "k" and (x != "g" or groups > 1)),
        **counts,
    )
    return call


def _written_out(xs: Sequence[Any], spec: AttentionSpec, bias_grad: bool | None) -> Any:
    """Return a pass of attention by JAX's operations."""
    (q, k, v, *rest), bias = xs, None
    if len(xs) in _WITH_BIAS:
        bias, *rest = rest
    if bias_grad is None:
        return composed.forward(q, k, v, bias, spec=spec)
    return composed.backward(q, k, v, bias, *rest, spec=spec, bias_grad=bias_grad)


def _of_rows(
    xs: Sequence[Any], names: tuple[str, ...], count: int, spec: AttentionSpec, bias_grad: Any
) -> tuple[Any, ...]:
    """Return a pass of attention of a part of so many queries."""
    q, k, v, *rest = xs
    added = [rest.pop(0)] if len(xs) in _WITH_BIAS else []
    bias, seen = added, spec.seen(count, k.shape[-3])
    if seen is not None:
        rows = q.shape[-3]
        mine = lax.dynamic_slice_in_dim(seen, lax.axis_index(names) * rows, rows)
        mine = mine.reshape((1,) * (q.ndim - 2) + mine.shape)
        bias = [jnp.where(mine, added[0] if added else 0.0, -jnp.inf)]
    found = _written_out([q, k, v, *bias, *rest], AttentionSpec(spec.scale), bias_grad)
    if bias_grad is None:
        return found
    dq, dk, dv, *dbias = found
    more = (composed.sum_to(x, added[0]) for x in dbias)
    return (dq, lax.psum(dk, names), lax.psum(dv, names), *more)


def _letters(avals: Sequence[Any], bias_grad: bool | None) -> tuple[list[Letters], list[Letters]]:
    """Return a letter for each axis of each operand and result.

    Heads are "n" of queries and "k" of keys; an axis of size one of a bias has its own letter.
    """
    batch = tuple(f"b{i}" for i in range(avals[0].ndim - 3))
    queries, keys = (*batch, "t", "n", "h"), (*batch, "s", "k", "h")
    values, out, rows = (*batch, "s", "k", "w"), (*batch, "t", "n", "w"), (*batch, "n", "t")
    known: list[Letters] = [queries, keys, values]
    if len(avals) in _WITH_BIAS:
        axes = zip((*batch, "n", "t", "s"), avals[3].shape, strict=True)
        known.append(tuple(x if n != 1 else f"u{i}" for i, (x, n) in enumerate(axes)))
    if bias_grad is None:
        return known, [out, rows]
    return [*known, out, rows, out], known[: 4 if bias_grad else 3]


def _is_free(letter: str) -> bool:
    """Return whether an axis may lie along axes of a mesh."""
    return letter in ("n", "t") or letter.startswith("b")


def _names(names: Any) -> list[str]:
    """Return the axes of a mesh in a spec, or in an entry of one."""
    if names is None or isinstance(names, str):
        return [names] if names else []
    return [a for entry in names for a in _names(entry)]


def _count(sharding: Any, names: Any) -> int:
    """Return how many parts an axis is divided into."""
    return math.prod(sharding.mesh.shape[a] for a in _names(names))
