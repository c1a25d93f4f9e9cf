"""Arrays of known numbers beyond float16, which are made and not captured."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import amp, plan_of
from jaxamp.core.formats import Precision
from tests.programs.registry import Draw

ROWS, WIDTH = 8, 16
DRAW = Draw("ranges")
X, Y = DRAW.normal(2, ROWS, WIDTH)
W = DRAW.weight(WIDTH, WIDTH)


def loss(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean of a distribution over bins (Hafner et al. 2023)."""
    points = jnp.linspace(-20, 20, WIDTH)
    bins = jnp.sign(points) * jnp.expm1(jnp.abs(points))
    mean = jax.nn.softmax(x @ w) @ bins
    return jnp.mean((jnp.sign(mean) * jnp.log1p(jnp.abs(mean)) - y[:, 0]) ** 2)


@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
def test_a_product_with_numbers_beyond_float16_is_finite(order: str) -> None:
    gradient = jax.grad(lambda *args: loss(*args))
    exact = jax.jit(gradient)(W, X, Y)
    inside = jax.grad(amp(lambda *args: loss(*args), "auto_mixed"))
    mixed = inside if order == "grad(amp(f))" else amp(gradient, "auto_mixed")
    assert np.linalg.norm(jax.jit(mixed)(W, X, Y) - exact) <= 0.05 * np.linalg.norm(exact)


def waves(x: jax.Array) -> jax.Array:
    return jnp.sin(x[:, :1] * jnp.exp(-jnp.log(10000.0) * jnp.arange(WIDTH) / WIDTH))


def added_by_rank(x: jax.Array) -> jax.Array:
    """The gradient of a beam search, in which scores of other beams are minus a billion."""
    order = jax.lax.top_k(jnp.where(x > 0, x, -1e9), WIDTH)[1]
    return jnp.zeros_like(x).at[jnp.arange(ROWS)[:, None], order].add(x)


def counted(x: jax.Array) -> jax.Array:
    """Decayed by a counter that saturates, as optax counts steps."""
    step, last = x[0, 0].astype("int32"), jnp.iinfo("int32").max
    return x * 0.9 ** jnp.where(step < last, step + 1, last)


MADE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "waves": waves,
    "triangle": lambda x: jnp.where(jnp.tri(ROWS, WIDTH) > 0, 0.5, -1.0),
    "frequencies": lambda x: jnp.arange(ROWS)[:, None] / 10000 ** (jnp.arange(WIDTH) / WIDTH),
    "chosen": lambda x: jnp.where(x > 0, jnp.linspace(-1, 1, WIDTH), 60000.0),
    "without infinities": jnp.nan_to_num,
    "beyond no float": lambda x: jnp.clip(x, jnp.finfo(x.dtype).min, jnp.finfo(x.dtype).max),
    "at places of large numbers": added_by_rank,
    "bounded": lambda x: jnp.clip(jnp.where(x > 0, x, 1e30), -100, 100),
    "counted up to the largest integer": counted,
}


@pytest.mark.parametrize("name", MADE)
def test_other_products_are_narrow(name: str) -> None:
    decisions = plan_of(lambda x: MADE[name](x) @ W, "auto_mixed")(X).decisions()
    (product,) = [d for d in decisions if d.primitive == "dot_general"]
    assert product.operand is Precision.F16


@pytest.mark.parametrize("least", [1e5, float(np.finfo(np.float32).max)])
def test_products_of_what_a_large_number_replaces_are_not(least: float) -> None:
    made = (
        lambda x: jnp.where(x > 0, x, -least),
        lambda x: jnp.where(jnp.isnan(x), 1e5, x),
        lambda x: jnp.maximum(1e5, x),
    )
    for fn in made:
        decisions = plan_of(lambda x, fn=fn: fn(x) @ W, "auto_mixed")(X).decisions()
        (product,) = [d for d in decisions if d.primitive == "dot_general"]
        assert product.operand is Precision.F32


@pytest.mark.parametrize(("places", "precision"), [(2049, Precision.F16), (2050, Precision.F32)])
def test_places_are_narrow_where_float16_has_them(places: int, precision: Precision) -> None:
    """It has all integers up to 2048."""
    w = jax.ShapeDtypeStruct((places, WIDTH), jnp.float32)
    decisions = plan_of(lambda w: jnp.arange(float(places)) @ w, "auto_mixed")(w).decisions()
    (product,) = [d for d in decisions if d.primitive == "dot_general"]
    assert product.operand is precision
