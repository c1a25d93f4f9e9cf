"""Programs over several devices; the test run has four of them, not real ones."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.programs.registry import program


def mesh() -> Mesh:
    """Four devices in a row, axis name `d`."""
    return Mesh(np.array(jax.devices()[:4]), ("d",))


@program(lambda d: (d.normal(8, 8), d.weight(8, 4)), low_dots=1, tags="devices")
def shard_map_rows(x: Array, w: Array) -> Array:
    """Data parallel: rows split, weights whole."""
    f = jax.shard_map(
        lambda x, w: jnp.tanh(x @ w), mesh=mesh(), in_specs=(P("d"), P()), out_specs=P("d")
    )
    return f(x, w)


@program(lambda d: (d.normal(4, 8), d.weight(8, 4)), low_dots=1, tags="devices")
def shard_map_psum(x: Array, w: Array) -> Array:
    """Tensor parallel: the contraction is split and summed across devices."""
    f = jax.shard_map(
        lambda x, w: lax.psum(x @ w, "d"),
        mesh=mesh(),
        in_specs=(P(None, "d"), P("d")),
        out_specs=P(),
    )
    return f(x, w)


@program(lambda d: (d.normal(4, 8), d.weight(8, 8)), low_dots=1, tags="devices")
def shard_map_gather(x: Array, w: Array) -> Array:
    """Weights gathered before use, a ring shift after it."""

    def body(x: Array, w: Array) -> Array:
        y = x @ lax.all_gather(w, "d", tiled=True)
        return lax.ppermute(y, "d", [(i, (i + 1) % 4) for i in range(4)])

    f = jax.shard_map(
        body, mesh=mesh(), in_specs=(P("d"), P("d")), out_specs=P("d"), check_vma=False
    )
    return f(x, w)


@program(lambda d: (d.normal(4, 2, 8), d.weight(8, 4)), low_dots=1, tags="devices")
def pmap_mean(x: Array, w: Array) -> Array:
    """The old way: pmap with a mean over its axis."""
    f = jax.pmap(lambda x, w: lax.pmean(x @ w, "i"), axis_name="i", in_axes=(0, None))
    return f(x, w)


@program(lambda d: (d.normal(8, 8), d.weight(8, 4)), low_dots=1, tags="devices")
def sharding_constraint(x: Array, w: Array) -> Array:
    """A constraint on an intermediate."""
    y = lax.with_sharding_constraint(x @ w, NamedSharding(mesh(), P("d")))
    return jnp.tanh(y)


@functools.partial(custom_partitioning, static_argnums=())
def _row_sum_of_squares(x: Array) -> Array:
    return (x * x).sum(-1)


def _partition(mesh, arg_shapes, result_shape):
    def lower(x: Array) -> Array:
        return (x * x).sum(-1)

    inputs = jax.tree.map(lambda a: a.sharding, arg_shapes)
    return mesh, lower, jax.tree.map(lambda a: a.sharding, result_shape), inputs


_row_sum_of_squares.def_partition(partition=_partition, sharding_rule="i j -> i")


@program(lambda d: (d.normal(4, 8), d.weight(8, 6)), low_dots=1, tags="devices")
def partitioned_by_hand(x: Array, w: Array) -> Array:
    """custom_partitioning: the function sees the dtype that it was written for."""
    return _row_sum_of_squares(x @ w)
