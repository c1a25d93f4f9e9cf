"""The judges are judged: the oracle that rounds products only, and the measures of error."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from tests.numerics.hostile import CASES
from tests.numerics.oracle import products_rounded
from tests.numerics.ulps import LOW, distance, error
from tests.programs.registry import Draw

each = pytest.mark.parametrize("low", LOW)


@each
def test_only_operands_of_products_are_rounded(low: str) -> None:
    """A product of rounded operands, and float32 around it."""
    draw = Draw("oracle")
    x, w = jnp.asarray(draw.normal(4, 64)), jnp.asarray(draw.normal(64, 4))

    def fn(x: Array, w: Array, product: Callable[..., Array]) -> Array:
        return jnp.sin(product(jnp.exp(x), w)) + x.sum(1, keepdims=True)

    got = products_rounded(lambda x, w: fn(x, w, jnp.matmul), LOW[low])(x, w)
    expected = fn(x, w, lambda a, b: _rounded(a, low) @ _rounded(b, low))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)
    assert error(got, fn(x, w, jnp.matmul), low) > 0.1


def _rounded(a: Array, low: str) -> Array:
    return a.astype(LOW[low]).astype(jnp.float32)


def _everything(x: Array, w: Array) -> Array:
    """Products in a jit, a scan, a while loop, a cond and a rematerialised function."""

    def scan(h: Array, _: None) -> tuple[Array, None]:
        return jax.checkpoint(jax.nn.relu)(h @ w), None

    h = lax.scan(scan, x, None, length=2)[0]
    h = lax.fori_loop(0, 2, lambda i, h: jax.jit(jnp.matmul)(h, w), h)
    h = lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ w), (0, h))[1]
    return lax.cond(h.sum() > -1e9, lambda h: h @ w, lambda h: h, h)


@each
def test_products_are_found_wherever_they_are(low: str) -> None:
    """Each of seven nested products sees rounded operands."""
    draw = Draw("nested oracle")
    x, w = jnp.asarray(draw.normal(4, 4)), jnp.asarray(draw.normal(4, 4))

    expected = x
    for i in range(7):
        expected = _rounded(expected, low) @ _rounded(w, low)
        expected = jax.nn.relu(expected) if i < 2 else expected
    got = products_rounded(_everything, LOW[low])(x, w)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("name", list(CASES)[::12], ids=lambda name: str(CASES[name]))
def test_without_rounding_the_oracle_is_the_program(name: str) -> None:
    """With float32 for the low format nothing changes."""
    case = CASES[name]
    fn = case.after(case.fn)
    pairs = zip(
        jax.tree.leaves(jax.jit(products_rounded(fn, jnp.float32))(*case.args)),
        jax.tree.leaves(jax.jit(fn)(*case.args)),
        strict=True,
    )
    for got, want in pairs:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_an_unknown_nest_is_refused() -> None:
    """A primitive with a jaxpr that the oracle does not know is an error, not a silence."""

    def solve(b: Array) -> Array:
        return lax.custom_linear_solve(lambda x: 2 * x, b, lambda f, b: b / 2, symmetric=True)

    with pytest.raises(NotImplementedError, match="custom_linear_solve"):
        products_rounded(solve, jnp.bfloat16)(jnp.ones(3))


@each
def test_errors_are_in_ulps(low: str) -> None:
    """One ulp off is 1, by the largest element or by its own; a NaN too many is infinite."""
    eps = float(jnp.finfo(LOW[low]).eps)
    reference = np.array([1.0, 0.25], np.float32)
    assert error(reference, reference, low) == 0
    off = reference + np.array([0, eps], np.float32)
    assert error(off, reference, low) == pytest.approx(1)
    assert error(off, reference, low, per_element=True) == pytest.approx(4)
    assert error(np.array([1, np.nan], np.float32), reference, low) == np.inf
    assert error(np.array([np.inf], np.float32), np.array([np.inf], np.float32), low) == 0
    assert error(np.array([1.0], np.float32), np.array([np.inf], np.float32), low) == np.inf


@each
def test_distances_are_in_low_numbers(low: str) -> None:
    """Neighbours are 1 apart, on both sides of a power of two and across zero."""
    dtype = LOW[low]
    tiny = float(jnp.finfo(dtype).smallest_subnormal)
    eps = float(jnp.finfo(dtype).eps)
    for a, b, apart in [(1, 1 + eps, 1), (1, 1 - eps / 2, 1), (tiny, -tiny, 2), (0.0, -0.0, 0)]:
        assert distance(np.array([a], np.float64), np.array([b], np.float64), low) == apart
    assert distance(np.array([np.nan], np.float32), np.array([np.nan], np.float32), low) == 0
    assert distance(np.array([1], np.float32), np.array([np.nan], np.float32), low) == np.inf
