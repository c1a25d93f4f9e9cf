"""Biases behind convolutions, and where their sum is rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import amp, plan_of
from jaxamp.core.formats import Precision
from tests.audit import equations
from tests.programs.registry import Draw

CHANNELS, GROUPS = 32, 8
DRAW = Draw("convolution biases")
X = DRAW.normal(4, 16, 16, CHANNELS)
W = DRAW.normal(2, 3, 3, CHANNELS, CHANNELS, scale=1 / 17)
BIAS = DRAW.normal(CHANNELS)


def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def normed(y: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    mean = y.mean(axes, keepdims=True)
    return (y - mean) * jax.lax.rsqrt(((y - mean) ** 2).mean(axes, keepdims=True) + 1e-5)


def by_group(y: jax.Array) -> jax.Array:
    parts = y.reshape(*y.shape[:-1], GROUPS, -1)
    return normed(parts, (1, 2, 4)).reshape(y.shape)


NORMS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "group": by_group,
    "instance": lambda y: normed(y, (1, 2)),
    "batch": lambda y: normed(y, (0, 1, 2)),
    "layer": lambda y: normed(y, (3,)),
    "none": lambda y: y,
}


def net(norm: str, w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    hidden = jax.nn.silu(NORMS[norm](convolved(x, w[0]) + bias))
    return (convolved(hidden, w[1]) ** 2).mean()


def narrow_biases(fn: Callable[..., Any], *args: Any) -> int:
    """How many biases a convolution's kernel is to add."""
    sums = [d for d in plan_of(fn)(*args).decisions() if d.primitive == "add"]
    return sum(d.operand is Precision.BF16 for d in sums)


@pytest.mark.parametrize("norm", NORMS)
def test_a_bias_is_added_narrow(norm: str) -> None:
    """XLA makes it again for norms of more than an image, in kernels that take it in float32."""
    expected = int(norm not in ("batch", "layer"))
    assert narrow_biases(lambda *args: net(norm, *args), W, BIAS, X) == expected
    assert narrow_biases(jax.grad(lambda *args: net(norm, *args)), W, BIAS, X) == expected


def test_a_convolution_that_is_read_twice_is_stored_itself() -> None:
    """Then its own kernel cannot hold the sum instead of it."""

    def twice(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
        hidden = convolved(x, w[0])
        return (convolved(by_group(hidden + bias) * hidden, w[1]) ** 2).mean()

    assert narrow_biases(twice, W, BIAS, X) == 0


def test_an_activation_is_no_bias() -> None:
    def residual(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
        inner = convolved(x, w[0])
        return (convolved(by_group(convolved(inner, w[1]) + inner), w[0]) ** 2).mean()

    sums = [d for d in plan_of(residual)(W, BIAS, X).decisions() if d.primitive == "add"]
    assert not any("bias" in d.reason for d in sums)


def test_what_is_added_to_an_image_is_stored_with_it() -> None:
    """In a U-Net an embedding of the time is added as well; its sum is rounded once more."""

    def embedded(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
        time = x.mean((1, 2)) @ w[0, 0, 0]
        hidden = by_group(convolved(x, w[0]) + bias + time[:, None, None])
        return (convolved(hidden, w[1]) ** 2).mean()

    assert narrow_biases(embedded, W, BIAS, X) == 2
    sums = [d for d in plan_of(embedded)(W, BIAS, X).decisions() if d.primitive == "add"]
    assert [d.outputs[0] for d in sums][:2] == [Precision.BF16, Precision.BF16]


def differentiated(norm: str, order: str, argnums: int = 0) -> Callable[..., Any]:
    def fn(*args: jax.Array) -> jax.Array:
        return net(norm, *args)

    return jax.grad(amp(fn), argnums) if order == "grad_of_amp" else amp(jax.grad(fn, argnums))


def hand(norm: str, w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    """Convolutions and biases are bfloat16, and the norm is float32."""
    low = jnp.bfloat16
    y = convolved(x.astype(low), w[0].astype(low)) + bias.astype(low)
    hidden = jax.nn.silu(NORMS[norm](y.astype(jnp.float32))).astype(low)
    return (convolved(hidden, w[1].astype(low)).astype(jnp.float32) ** 2).mean()


def error(found: jax.Array, norm: str, argnums: int = 0) -> Any:
    exact = np.asarray(jax.grad(lambda *args: net(norm, *args), argnums)(W, BIAS, X))
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


@pytest.mark.product("order")
@pytest.mark.parametrize("order", ["grad_of_amp", "amp_of_grad"])
@pytest.mark.parametrize("norm", ["group", "instance"])
def test_gradients_are_no_worse_than_by_hand(norm: str, order: str) -> None:
    by_hand = jax.grad(lambda *args: hand(norm, *args))(W, BIAS, X)
    assert error(differentiated(norm, order)(W, BIAS, X), norm) <= error(by_hand, norm)


@pytest.mark.parametrize("order", ["grad_of_amp", "amp_of_grad"])
def test_gradients_of_biases_are_added_up_in_float32(order: str) -> None:
    """By hand that is done in bfloat16, as XLA:CPU does it, and a tenth of each is lost."""
    by_hand = jax.grad(lambda *args: hand("group", *args), 1)(W, BIAS, X)
    found = differentiated("group", order, 1)(W, BIAS, X)
    assert error(found, "group", 1) < 0.01 < error(by_hand, "group", 1)


@pytest.mark.parametrize("order", ["grad_of_amp", "amp_of_grad"])
def test_the_sum_is_kept_for_the_backward_pass(order: str) -> None:
    """Else it would be made again there, from a convolution without its bias."""
    jaxpr = jax.make_jaxpr(differentiated("group", order))(W, BIAS, X).jaxpr
    sums = [e for e in equations(jaxpr) if e.primitive.name in ("add", "rounded_cotangent")]
    narrow = [e for e in sums if e.outvars[0].aval.dtype == jnp.bfloat16]
    assert [e.outvars[0].aval.shape for e in narrow] == [X.shape]
