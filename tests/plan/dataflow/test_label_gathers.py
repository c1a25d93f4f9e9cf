"""Lookups of single numbers of each row: labels' logits, whose cotangents nearly cancel others."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Jaxpr

from jaxamp import amp
from jaxamp.xla.primitives.label_gather import gather_by_sum
from tests.audit import equations
from tests.numerics.oracle import products_rounded
from tests.programs.registry import Draw

ROWS, WIDTH, LABELS = 96, 32, 50  # 1 / ROWS is no number of bfloat16
DRAW = Draw("label gathers")
LABEL = DRAW.integers(LABELS, ROWS)
W = DRAW.normal(WIDTH, LABELS)
# Rows whose labels are nearly certain, as after training.
X = 3 * (W / np.linalg.norm(W, axis=0))[:, LABEL].T + DRAW.normal(ROWS, WIDTH, scale=1 / 9)
LOW = {"auto_mixed_bf16": jnp.bfloat16, "auto_mixed": jnp.float16}

Loss = Callable[[jax.Array], jax.Array]


def along_axis(logits: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(logits, LABEL[:, None], -1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def in_columns(logits: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(logits.T, LABEL[None], 0)[0]
    return jnp.mean(jax.nn.logsumexp(logits.T, 0) - picked)


def by_rows(logits: jax.Array) -> jax.Array:
    return jnp.mean(jax.vmap(lambda row, i: jax.nn.logsumexp(row) - row[i])(logits, LABEL))


LOSSES: dict[str, Loss] = {
    "along_axis": along_axis,
    "in_columns": in_columns,
    "by_rows": by_rows,
    "indexed": lambda x: jnp.mean(jax.nn.logsumexp(x, -1) - x[jnp.arange(ROWS), LABEL]),
    "log_softmax": lambda x: -jnp.mean(jax.nn.log_softmax(x)[jnp.arange(ROWS), LABEL]),
    "optax": lambda x: optax.softmax_cross_entropy_with_integer_labels(x, LABEL).mean(),
    "soft_labels": lambda x: optax.softmax_cross_entropy(x, jax.nn.one_hot(LABEL, LABELS)).mean(),
}


def closure(of_logits: Loss) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return of_logits(x @ w)

    return loss


@pytest.mark.product("name")
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", LOSSES)
def test_certain_labels_have_gradients(name: str, policy: str, order: str) -> None:
    """Probability and label meet before either is rounded: their difference is the gradient."""
    fn = closure(LOSSES[name])
    exact = jax.jit(jax.grad(fn))(W, X)
    rounded = jax.jit(jax.grad(products_rounded(fn, LOW[policy])))(W, X)
    mixed = amp(jax.grad(fn), policy) if order == "amp(grad(f))" else jax.grad(amp(fn, policy))
    allowed = 3 * np.linalg.norm(rounded - exact)
    assert 0 < np.linalg.norm(jax.jit(mixed)(W, X) - exact) <= allowed


@pytest.mark.parametrize("name", ["along_axis", "in_columns", "optax"])
def test_the_gradient_of_a_lookup_is_not_scattered(name: str) -> None:
    fn = closure(LOSSES[name])
    gradients = jax.grad(fn), jax.grad(amp(fn)), amp(jax.grad(fn))
    scattered = [
        any(
            e.primitive.name == "scatter-add" and e.outvars[0].aval.size == ROWS * LABELS
            for e in equations(jax.make_jaxpr(gradient)(W, X).jaxpr)
        )
        for gradient in gradients
    ]
    assert scattered == [True, False, False]


@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
def test_lookups_are_in_the_group_of_the_softmax(order: str) -> None:
    """A later scatter reads the places as well: they do not part the lookup from the group."""

    def fn(w: jax.Array, x: jax.Array, label: jax.Array) -> jax.Array:
        likely = jax.nn.log_softmax(x @ w)
        return -jnp.take_along_axis(likely, label[:, None], -1).mean()

    mixed = amp(jax.grad(fn)) if order == "amp(grad(f))" else jax.grad(amp(fn))

    def lookups(jaxpr: Jaxpr) -> int:
        return sum(e.primitive.name == "label_gather" for e in equations(jaxpr))

    jaxpr = jax.make_jaxpr(mixed)(W, X, LABEL).jaxpr
    groups = [e for e in equations(jaxpr) if e.primitive.name == "fused_group"]
    assert sum(lookups(e.params["jaxpr"]) for e in groups) == lookups(jaxpr) == 1


def test_places_beyond_the_row_are_those_of_float32() -> None:
    """NaN is found there, and no gradient goes back; negative places count from the end."""
    places = jnp.array([0, LABELS - 1, -1, -LABELS, LABELS, -LABELS - 1])

    def found(x: jax.Array, w: jax.Array) -> jax.Array:
        logits = x @ w
        return jnp.take_along_axis(jnp.tanh(logits), places[:, None], -1)[:, 0]

    x = X[: len(places)]
    np.testing.assert_allclose(amp(found)(x, W), found(x, W), rtol=0.02, atol=0.02)
    gradient = jax.jacrev(found)
    for mixed in (jax.jacrev(amp(found)), amp(gradient)):
        np.testing.assert_allclose(mixed(x, W), gradient(x, W), rtol=0.1, atol=0.05)


@pytest.mark.parametrize("axis", [0, 1])
def test_on_a_tpu_lookups_are_sums_of_rows(axis: int) -> None:
    """To the last bit, beyond the row as well."""
    table = jnp.asarray(Draw("table").normal(6, 6)).at[1, 1].set(jnp.inf)
    places = jnp.expand_dims(jnp.array([0, 1, 5, -1, 6, -7]), axis)
    closed = jax.make_jaxpr(lambda t, i: jnp.take_along_axis(t, i, axis))(table, places)
    (lookup,) = (e for e in equations(closed.jaxpr) if e.primitive.name == "gather")
    indices = jnp.where(places < 0, places + 6, places).reshape(lookup.invars[1].aval.shape)
    found = jax.jit(partial(gather_by_sum, **lookup.params))(table, indices)
    np.testing.assert_array_equal(found, jnp.take_along_axis(table, places, axis))


DERIVATIVES: dict[str, Callable[[Callable[..., jax.Array]], Callable[..., jax.Array]]] = {
    "forward": lambda f: jax.jacfwd(f),
    "of_each": lambda f: lambda w, x: jax.vmap(jax.grad(f), (0, None))(jnp.stack([w, -w]), x),
    "curvature": lambda f: lambda w, x: jax.jvp(jax.grad(lambda w: f(w, x)), (w,), (w,))[1],
    "under_checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.product("derivative", every=2)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_lookups_have_all_derivatives(derivative: str) -> None:
    derive, fn = DERIVATIVES[derivative], closure(along_axis)
    exact = jax.jit(derive(fn))(W, X)
    rounded = jax.jit(derive(products_rounded(fn, jnp.bfloat16)))(W, X)
    found = jax.jit(derive(amp(fn, "auto_mixed_bf16")))(W, X)
    assert np.linalg.norm(found - exact) <= 3 * np.linalg.norm(rounded - exact)
