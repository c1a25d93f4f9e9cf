"""Sums over middle axes, added up in parts where a group is lowered for one GPU."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import amp
from jaxamp.xla.primitives.split_sums import split_sums
from tests.audit import equations

IMAGES = jax.ShapeDtypeStruct((4, 512, 4, 64), jnp.float32)


def sums(fn: Callable[..., Any], *args: Any) -> int:
    """How many sums the changed program has, or 0 where nothing is changed."""
    closed = jax.make_jaxpr(fn)(*args)
    changed = split_sums(closed)
    if changed is closed:
        return 0
    return sum(eqn.primitive.name == "reduce_sum" for eqn in equations(changed.jaxpr))


@pytest.mark.parametrize(
    ("axes", "found"),
    [((1, 2), 2), ((1,), 2), ((1, 3), 2), ((2,), 0), ((3,), 0), ((0, 1, 2), 0), ((1, 2, 3), 0)],
)
def test_sums_between_kept_axes_are_split(axes: tuple[int, ...], found: int) -> None:
    assert sums(lambda x: x.sum(axes), IMAGES) == found


@pytest.mark.parametrize("shape", [(4, 8, 8, 16), (1, 256, 32, 64), (4, 31, 512, 64)])
def test_small_and_single_images_and_odd_axes_are_left(shape: tuple[int, ...]) -> None:
    """What stays in a cache costs nothing, and XLA splits the sums of one image itself."""
    assert sums(lambda x: x.sum((1, 2)), jax.ShapeDtypeStruct(shape, jnp.float32)) == 0


@pytest.mark.parametrize("axes", [(1, 2), (1, 3), (1,)])
def test_numbers_are_the_same(axes: tuple[int, ...]) -> None:
    x = jax.random.normal(jax.random.key(0), IMAGES.shape)
    changed = split_sums(jax.make_jaxpr(lambda x: x.sum(axes))(x))
    (found,) = jax.core.eval_jaxpr(changed.jaxpr, changed.consts, x)
    np.testing.assert_allclose(found, np.sum(np.float64(x), axes), rtol=1e-5, atol=1e-3)


def test_sums_of_whole_numbers_and_narrow_ones_are_left() -> None:
    """Parts of a narrow sum would be rounded."""
    for dtype in (jnp.int32, jnp.bfloat16):
        images = jax.ShapeDtypeStruct(IMAGES.shape, dtype)
        assert sums(lambda x: jax.lax.reduce_sum(x, (1, 2)), images) == 0


def modulated(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalize rows under a scale of each image."""
    x = x @ w
    centred = x - x.mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return jnp.sum((normed * scale[:, None] @ w) ** 2)


@pytest.mark.parametrize("order", [lambda f: jax.grad(amp(f), 2), lambda f: amp(jax.grad(f, 2))])
def test_gradients_of_a_modulation_are_added_up_in_parts_on_gpus(order: Any) -> None:
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 512, 256), (256, 256), (4, 256))]
    step = jax.jit(order(modulated)).trace(*args)
    parts = "tensor<4x2x256x256xf32>"
    assert parts in step.lower(lowering_platforms=("cuda",)).as_text()
    assert parts not in step.lower(lowering_platforms=("tpu",)).as_text()
