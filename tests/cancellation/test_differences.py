"""Products that are cancelled or are phases keep the accuracy of the same program without them."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.deviceless.models import EVERY
from jaxamp import PrecisionPolicy, Rule, amp, plan_of
from jaxamp.cancellation import finite_differences
from jaxamp.core.formats import Precision
from jaxamp.plan import plan_program
from tests.cancellation.differences import CASES, NARROW, W, X, Y, powers, sines
from tests.fields.oracle import Oracle, evaluated
from tests.numerics.ulps import POLICIES

ORDERS = ("amp", "amp(grad)", "grad(amp)")
TIMES = 3
"""An error may be so many times that of float32, or of the program that multiplies elementwise."""
MADE_BY_PRODUCTS = ("use k_means",)
"""Products make what is subtracted, and products with that cancel: two reasons."""
ELSE = ("reads the result of a matrix factorization", "a product with equal numbers is a sum")
"""Why they are float32 in any case, whatever they cancel."""


@pytest.mark.product("name", every=4)
@pytest.mark.parametrize("low", POLICIES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CASES)
def test_every_spelling_has_the_accuracy_of_the_direct_one(name: str, order: str, low: str) -> None:
    case = CASES[name]
    if order != "amp" and not _is_differentiable(case.fn, case.args):
        order = "amp"
    plain, direct = (_ordered(fn, order, case.args) for fn in (case.fn, case.direct))
    exact = evaluated(direct, case.args, [Oracle(np.float64)])[0]
    mixed = (_ordered(fn, order, case.args, POLICIES[low]) for fn in (case.fn, case.direct))
    found, elementwise, float32 = (_error(jax.jit(fn)(*case.args), exact) for fn in (*mixed, plain))
    assert found <= TIMES * max(float32, elementwise, 1e-6)


@pytest.mark.parametrize("name", CASES)
def test_products_say_why_they_are_not_rounded(name: str) -> None:
    case = CASES[name]
    whys = {d.reason: d.operand for d in plan_of(case.fn)(*case.args).decisions()}
    said = [why for why in whys if re.search("nearly cancel|periodic|leaves a difference", why)]
    said = said or [why for why in whys if why in ELSE]
    wanted = [Precision.F32] * (1 + (name in MADE_BY_PRODUCTS))
    assert [whys[why] for why in said] == wanted or name.startswith("phase outer")


@pytest.mark.parametrize("order", ORDERS[:2])
@pytest.mark.parametrize("name", NARROW)
def test_what_cancels_nothing_is_narrow(name: str, order: str) -> None:
    case = NARROW[name]
    if order != "amp" and not _is_differentiable(case.fn, case.args):
        order = "amp"
    decisions = plan_of(_ordered(case.fn, order, case.args))(*case.args).decisions()
    products = [d for d in decisions if d.kind.value == "Compute"]
    of_layers = [d for d in products if "inner product" not in d.reason]
    assert {d.operand for d in of_layers} == {Precision.BF16}


def test_distances_of_which_exponentials_are_taken_are_stored_wide() -> None:
    """A plan of transport that changes its own costs; later kernels read these from memory."""

    def cost(x: jax.Array, y: jax.Array) -> jax.Array:
        d, shares = powers(x, y), jnp.ones((len(x), len(y)))
        for _ in range(2):
            costs = d + powers(d @ shares.T, d @ shares.T) @ shares
            shares = jnp.exp(-(costs - costs.min()))
        return (shares * costs).sum()

    decisions = plan_of(jax.grad(cost))(X, Y).decisions()
    assert {d.output for d in decisions if d.primitive in ("add", "sub")} == {Precision.F32}


def test_the_phases_of_layers_are_narrow_where_they_are_the_work() -> None:
    products = [d.operand for d in plan_of(sines)(X, W).decisions() if d.kind.value == "Compute"]
    assert products == [Precision.F32, *[Precision.BF16] * 4] or set(products) == {Precision.BF16}


def test_the_phases_of_a_small_layer_are_not_rounded() -> None:
    """An angle that a network has made, among products that are the work."""

    def turned(x: jax.Array, w: jax.Array) -> jax.Array:
        h = x
        for _ in range(8):
            h = jnp.tanh(h @ w)
        return jnp.sin(h @ w[:, :1])

    products = [d.operand for d in plan_of(turned)(X, W).decisions() if d.kind.value == "Compute"]
    assert products == [*[Precision.BF16] * 8, Precision.F32]


def test_a_rule_rounds_them_all_the_same() -> None:
    policy = PrecisionPolicy.MIXED_BF16.with_rules(Rule(precision="bf16", primitive="dot_general"))
    (product,) = [d for d in plan_of(powers, policy)(X, Y).decisions() if d.kind.value == "Compute"]
    assert product.operand is Precision.BF16


def test_an_outer_product_is_planned_as_what_multiplies_elementwise() -> None:
    """A row and a column multiplied, contracted over an axis of one, and contracted over none."""

    def embedded(x: jax.Array, w: jax.Array) -> jax.Array:
        row, column = jnp.split((x @ w)[:1], 2, -1)
        each = row.T * column, row.T @ column, jnp.einsum("i,j->ij", row[0], column[0])
        return jnp.tanh(jnp.stack(each)) @ w[:4]

    decisions = plan_of(embedded)(X, W).decisions()
    found = [d for d in decisions if d.kind.value == "Elementwise" and d.primitive != "tanh"]
    products = [d for d in found if d.primitive in ("mul", "dot_general")]
    assert [d.primitive for d in products] == ["mul", "dot_general", "dot_general"]
    assert len({(d.operand, d.output, d.reason) for d in products}) == 1


@pytest.mark.long
@pytest.mark.feature("compiled")
def test_parts_of_one_product_that_turn_queries_are_no_residual():
    """In a scan over layers: each makes the next, and so is made of its own queries."""
    from jaxamp.compiled.targets import TARGETS

    size, chip = EVERY["llama"].full, TARGETS["h200"]
    args = [jax.eval_shape(make, jax.random.key(0)) for make in (size.init, size.sample)]
    with chip.described():
        plan = plan_of(lambda *args: size.plain(*args)[0], "mixed_bf16")(*args)
    assert {d.operand for d in plan.decisions() if d.kind.value == "Compute"} == {Precision.BF16}


def _is_differentiable(fn: Any, args: Any) -> bool:
    return jax.tree.leaves(jax.eval_shape(fn, *args))[-1].dtype == np.float32


def _ordered(fn: Any, order: str, args: Any, policy: str | None = None) -> Any:
    """Build what is run: the program, or the gradient of a weighted sum of its last result."""

    def weighted(*args: Any) -> jax.Array:
        y = jax.tree.leaves(fn(*args))[-1]
        return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum()

    wrap = functools.partial(amp, policy=policy) if policy else lambda fn: fn
    grad = functools.partial(jax.grad, argnums=tuple(range(len(args))))
    if order == "amp":
        return wrap(lambda *args: fn(*args))
    return wrap(grad(weighted)) if order == "amp(grad)" else grad(wrap(weighted))


def _error(got: Any, exact: Any) -> float:
    """Return the largest error: of floats relative to the largest, of integers their share."""
    return max(map(_one_error, jax.tree.leaves(got), jax.tree.leaves(exact)))


def _one_error(got: Any, exact: Any) -> float:
    got, exact = np.asarray(got, np.float64), np.asarray(exact)
    if exact.dtype.kind in "iu":
        return float((got != exact).mean())
    error = np.abs(got - exact).max() / (np.abs(exact).max() or 1.0)
    return float(error) if np.isfinite(error) else float("inf")


def test_the_mean_of_a_norm_is_no_step_of_a_slope(monkeypatch: pytest.MonkeyPatch):
    """Or values would be numbered, to find slopes, in each network that has a norm."""
    monkeypatch.setattr(finite_differences, "_Places", lambda *_: pytest.fail("numbers values"))

    def normed(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(2):
            centred = x - x.mean(-1, keepdims=True)
            x = x + centred / jnp.sqrt(jnp.var(x, -1, keepdims=True) + 1e-5) @ w
        return jnp.mean(x**2)

    args = jnp.ones((8, 64)), jnp.ones((64, 64))
    plan_program(jax.make_jaxpr(jax.grad(normed))(*args), PrecisionPolicy.MIXED_BF16)


def test_a_norm_may_have_no_rows() -> None:
    """Nor has its mean any elements then, of which each adds up some."""

    def normed(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum((x - x.mean(-1, keepdims=True)) @ w)

    x, w = jnp.ones((0, 64)), jnp.ones((64, 64))
    for step in (jax.grad(amp(normed)), amp(jax.grad(normed))):
        np.testing.assert_array_equal(step(w, x), jnp.zeros_like(w))
