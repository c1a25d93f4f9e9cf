"""Weights of products: rounded once, however often they are read, and differentiated in float32."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxamp import amp
from tests.audit import PRODUCTS, equations, products

SIZE, TURNS = 16, 5
W = jax.random.normal(jax.random.key(0), (SIZE, SIZE)) / SIZE**0.5
X = jax.random.normal(jax.random.key(1), (8, SIZE))


def scanned(w, x):
    """A recurrent layer."""
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), x @ w), x, length=TURNS)


def repeated(w, x):
    """The same in a loop that is not differentiated in reverse."""
    return lax.fori_loop(0, TURNS, lambda _, x: jnp.tanh(x @ w) @ w, x)


def in_two_loops(w, x):
    """A loop in a loop, which reads what is outside of both."""
    return lax.scan(lambda x, _: (scanned(w, x)[0], None), x, length=TURNS)


LOOPS = pytest.mark.parametrize("fn", [scanned, repeated, in_two_loops], ids=lambda f: f.__name__)


def roundings(jaxpr):
    """How often something of a weight's size is rounded, and where: in a loop, or outside."""
    inside = [e for loop in equations(jaxpr) for e in _in_loops(loop)]
    every = [e for e in equations(jaxpr) if _is_rounding(e)]
    within = [e for e in inside if _is_rounding(e)]
    return Counter(inside=len(within), outside=len(every) - len(within))


def _in_loops(eqn):
    if eqn.primitive.name in ("scan", "while"):
        yield from equations(eqn.params.get("body_jaxpr", eqn.params.get("jaxpr")).jaxpr)


def _is_rounding(eqn):
    return (
        eqn.primitive.name == "convert_element_type"
        and eqn.outvars[0].aval.shape == (SIZE, SIZE)
        and eqn.outvars[0].aval.dtype == jnp.bfloat16
    )


@LOOPS
def test_a_loop_reads_a_weight_that_is_rounded_outside(fn):
    assert roundings(jax.make_jaxpr(amp(fn))(W, X).jaxpr) == {"inside": 0, "outside": 1}


def test_both_passes_read_one_rounding():
    def loss(w, x):
        return jnp.sum(scanned(w, x)[0] ** 2)

    jaxpr = jax.make_jaxpr(amp(jax.grad(loss)))(W, X).jaxpr
    assert roundings(jaxpr) == {"inside": 0, "outside": 1}


@LOOPS
def test_loops_agree_with_float32(fn):
    exact, ours = jax.tree.leaves(fn(W, X)), jax.tree.leaves(amp(fn)(W, X))
    for low, high in zip(ours, exact, strict=True):
        assert low.dtype == jnp.float32
        np.testing.assert_allclose(low, high, atol=0.03)


@pytest.mark.parametrize("fn", [scanned, lambda w, x: (x @ w @ w + x @ (w @ w) @ w) @ w @ w])
def test_what_is_made_of_weights_has_a_gradient_of_float32(fn):
    """Cotangents of transition probabilities are alike in a row, and a softmax leaves the rest."""

    def loss(w, x):
        return jnp.mean(jax.tree.leaves(fn(jax.nn.softmax(3 * w), 4 + x))[0] ** 2)

    exact = jax.grad(loss)(W, X)
    off = jnp.linalg.norm(jax.grad(amp(loss))(W, X) - exact)
    assert off < 0.02 * jnp.linalg.norm(exact)


def test_products_of_all_derivatives_are_narrow_and_gradients_are_accumulators():
    """Second derivatives too: no product of float32 operands, no gradient that was rounded."""

    def loss(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

    def curvature(w, x, v):
        return jax.jvp(lambda w: jax.grad(amp(loss))(w, x), (w,), (v,))[1]

    jaxpr = jax.make_jaxpr(curvature)(W, X, W).jaxpr
    assert products(jaxpr)
    assert all(product.is_low for product in products(jaxpr))
    results: list[Any] = [
        e.outvars[0].aval for e in equations(jaxpr) if e.primitive.name in PRODUCTS
    ]
    gradients = [aval for aval in results if aval.shape == W.shape]
    assert gradients
    assert {aval.dtype for aval in gradients} == {jnp.dtype("float32")}
    exact = jax.jvp(lambda w: jax.grad(loss)(w, X), (W,), (W,))[1]
    error = jnp.linalg.norm(curvature(W, X, W) - exact)
    assert error < 0.02 * jnp.linalg.norm(exact)


@pytest.mark.product("axes")
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=["models", "data", "both"])
@pytest.mark.parametrize("order", ["grad of vmap", "vmap of grad"])
def test_batches_of_weights(axes, order):
    """Whatever has a batch axis, the gradient is what it is one by one."""
    w, x = (jnp.stack([a, a / 2, -a]) if d == 0 else a for a, d in zip((W, X), axes, strict=True))

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    if order == "vmap of grad":
        found = jax.vmap(jax.grad(amp(loss)), axes)(w, x)
    else:
        found = jax.grad(lambda w: jnp.sum(jax.vmap(amp(loss), axes)(w, x)))(w)
    each = [
        jax.grad(amp(loss))(w[i] if axes[0] == 0 else w, x[i] if axes[1] == 0 else x)
        for i in range(3)
    ]
    expected = jnp.stack(each)
    if order == "grad of vmap" and axes[0] is None:
        expected = expected.sum(0)
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(found, expected, atol=2e-2 * scale)
    assert found.dtype == jnp.float32


def test_a_product_with_whole_numbers():
    """It is no product of two floats, and is left to JAX."""
    whole = (jnp.arange(8 * SIZE, dtype=jnp.int8) % 3).reshape(8, SIZE) - 1

    def loss(w):
        return jnp.sum(jnp.tanh(lax.dot_general(whole, w, (((1,), (0,)), ((), ())))))

    np.testing.assert_allclose(amp(loss)(W), loss(W), atol=0.1)
    np.testing.assert_allclose(jax.grad(amp(loss))(W), jax.grad(loss)(W), atol=0.1)
