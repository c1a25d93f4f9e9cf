"""What makes an array, and of which array a value is, leads from newer values to older ones."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from jaxamp.cancellation.arrays import Arrays
from jaxamp.plan.graph.unfold import unfold

X = jnp.ones((4, 4))


def scaled_in_a_loop(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 3, lambda _, y: y * 2.0, x)


def scaled_until_small(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda y: y.max() > 0.1, lambda y: -y / 2.0, x)


def moved_in_nested_loops(x: jax.Array) -> jax.Array:
    def step(y: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        return scaled_in_a_loop(y.T), y

    y, ys = jax.lax.scan(step, x, length=2)
    return y + ys.sum(0)


@pytest.mark.parametrize("fn", [scaled_in_a_loop, scaled_until_small, moved_in_nested_loops])
def test_the_path_of_an_array_ends_though_a_loop_carries_it(fn: Callable[..., jax.Array]) -> None:
    closed = jax.make_jaxpr(fn)(X)
    graph, _ = unfold(closed)
    arrays = Arrays(graph)
    for value in range(len(graph.avals)):
        newest, longest = value, len(graph.nodes)
        path = [*itertools.islice(arrays.path(value), longest + 1)]
        assert len(path) <= longest
        for _, source in path:
            assert source < newest
            newest = source
        assert newest == arrays.origins[value]
