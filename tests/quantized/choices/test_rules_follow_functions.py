"""Products of derivative rules, which are planned apart from the function that they derive."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from jaxamp import PrecisionPolicy, amp
from jaxamp.quantized.fp8_products import claims

WIDTH = 32
POLICY = PrecisionPolicy.FP8_CURRENT.replace(scaling={"small": ()})
Product = Callable[[jax.Array, jax.Array], jax.Array]


@jax.custom_jvp
def by_jvp(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


@by_jvp.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> object:
    (x, w), (dx, dw) = primals, tangents
    return x @ w, dx @ w + x @ dw


@jax.custom_vjp
def by_vjp(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


by_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


def network(product: Product, at: int) -> Callable[[list[jax.Array], jax.Array], jax.Array]:
    """Return the loss of four layers, one of which multiplies by a function with a rule."""

    def loss(layers: list[jax.Array], x: jax.Array) -> jax.Array:
        for place, w in enumerate(layers):
            x = jnp.tanh(product(x, w) if place == at else x @ w)
        return jnp.mean(x**2)

    return loss


@pytest.mark.parametrize("product", [by_jvp, by_vjp])
def test_a_rule_of_the_last_layer_is_quantized_no_more_than_the_layer(product: Product) -> None:
    """Two of four layers are quantized, and two more products of each in the backward pass."""
    layers, x = [jnp.eye(WIDTH)] * 4, jnp.ones((64, WIDTH))
    gradient = jax.grad(amp(network(product, at=3), POLICY))
    assert claims(jax.make_jaxpr(gradient)(layers, x)) == 6


@pytest.mark.parametrize(("product", "quantized"), [(by_jvp, 6), (by_vjp, 5)])
def test_a_rule_of_a_quantized_layer_is_quantized(product: Product, quantized: int) -> None:
    """A backward rule does not say that both operands of one of its products are activations."""
    layers, x = [jnp.eye(WIDTH)] * 4, jnp.ones((64, WIDTH))
    gradient = jax.grad(amp(network(product, at=1), POLICY))
    assert claims(jax.make_jaxpr(gradient)(layers, x)) == quantized
