"""Joins that are stored for later kernels, which read them as they are or moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import Precision, amp, plan_of
from tests.numerics.oracle import products_rounded

X, W, BIAS = (np.ones(shape, np.float32) for shape in [(4, 16, 32), (2, 32, 32), (32,)])

Layer = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def whole(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ w[0].T + bias) @ w[1].T


def mapped(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    """A layer for one word, whose cotangents `vmap` transposes for the products with weights."""

    def word(x: jax.Array) -> jax.Array:
        return w[1] @ jax.nn.gelu(w[0] @ x + bias)

    return jax.vmap(jax.vmap(word))(x)


@pytest.mark.parametrize("layer", [whole, mapped])
def test_the_sum_of_a_cotangent_reads_what_products_read(layer: Layer) -> None:
    """Else the cotangent is stored twice, in float32 for its sum and rounded for the products."""

    def loss(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(layer(w, bias, jnp.tanh(x @ w[0]))))

    decisions = [*plan_of(jax.grad(loss, (0, 1)), "auto_mixed_bf16")(W, BIAS, X).decisions()]
    sums: Any = [d.eqn for d in decisions if d.primitive == "reduce_sum"]
    (of_rows,) = (e for e in sums if e.invars[0].aval.size > e.outvars[0].aval.size == BIAS.size)
    (made,) = (d for d in decisions if of_rows.invars[0] in d.eqn.outvars)
    assert made.output is Precision.BF16, made.reason


def gated(w: jax.Array, x: jax.Array) -> jax.Array:
    h = (x @ w[0]) * jax.nn.silu(x @ w[1])
    return h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-6)


def filtered(w: jax.Array, x: jax.Array) -> jax.Array:
    """Three taps along the words, and what several kernels read of them."""
    padded = jnp.pad(x @ w[0], ((0, 0), (2, 0), (0, 0)))
    taps = [padded[:, i : i + x.shape[1]] * w[1, i] for i in range(3)]
    y = jax.nn.silu(taps[0] + taps[1] + taps[2])
    return y * w[1, 3] + (y * w[1, 4]) @ w[0]


def divided(w: jax.Array, x: jax.Array) -> jax.Array:
    """Two taps, and two products of parts of what is made of them."""
    padded = jnp.pad(x @ w[0], ((0, 0), (1, 0), (0, 0)))
    y = jax.nn.silu(padded[:, :-1] * w[1, 0] + padded[:, 1:] * w[1, 1])
    return y[..., :16] @ w[0, :16] + y[..., 16:] @ w[1, :16]


def waiting(w: jax.Array, x: jax.Array) -> jax.Array:
    """Half of what is made gates a mixture of the words of the other half (Liu et al. 2021)."""
    gates, h = jnp.split(jax.nn.silu(x @ w[0]), 2, -1)
    return (gates * jnp.einsum("st,btc->bsc", w[1, : x.shape[1], : x.shape[1]], h)) @ w[0, :16]


@pytest.mark.parametrize(("fn", "stored"), [(gated, 1), (filtered, 4), (divided, 2), (waiting, 0)])
def test_what_xla_would_store_inside_of_a_region_is_stored_narrow(
    fn: Callable[[jax.Array, jax.Array], jax.Array], stored: int
) -> None:
    """Gates before a norm, sums of windows, parts of such: a kernel writes them in any case."""
    decisions = plan_of(lambda w, x: jnp.tanh(fn(w, x) @ w[0]), "auto_mixed_bf16")(W, X).decisions()
    products = [d for d in decisions if d.primitive == "mul"]
    assert products[stored].output is Precision.BF16, products[stored].reason


def norm(h: jax.Array) -> jax.Array:
    return h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-6)


def scattered(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    y = norm(x @ w[0]) + bias
    return jnp.zeros((8, *y.shape[1:])).at[jnp.arange(4)].add(y)


def read_twice(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    y = norm(x @ w[0]) + bias
    return y + jax.nn.silu(jnp.concatenate([y, jnp.tanh(x @ w[1])], -1) @ w.reshape(-1, 32))


def begun(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    h = x @ w[0] + bias
    return h + norm(h) @ w[1]


@pytest.mark.parametrize("fn", [scattered, read_twice, begun])
def test_what_is_read_beside_a_norm_is_stored_narrow(fn: Layer) -> None:
    """A norm's kernel sums rows: what it makes is no part of a scatter's, or of several others'.

    Nor is it begun again for what is added to its operand later.
    """
    plan = plan_of(lambda w, b, x: jnp.tanh(fn(w, b, x) @ w[0]), "auto_mixed_bf16")(W, BIAS, X)
    sums = [d for d in plan.decisions() if d.primitive == "add" and d.operand]
    biased = next(d for d in sums if d.eqn.invars[1].aval.shape == (1, 1, 32))
    assert biased.output is Precision.BF16, biased.reason


def test_what_a_norm_reads_is_computed_again_for_its_own_gradient() -> None:
    """A product and a bias, of which the backward pass reads the product in any case."""

    def squared(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
        h = x @ w[0] + bias
        scale = jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)
        return jnp.sum(jnp.tanh(jnp.tanh(h * scale) @ w[1]))

    plan = plan_of(jax.grad(squared, argnums=(0, 1)), "auto_mixed_bf16")(W, BIAS, X)
    biased = next(d for d in plan.decisions() if d.primitive == "add")
    assert biased.output is Precision.F32, biased.reason


@pytest.mark.parametrize(("layers", "stored"), [(8, 0), (12, 1)])
def test_what_skips_to_one_sum_is_added_up_there(layers: int, stored: int) -> None:
    """A sum that only the next one reads would be written and read for each layer."""

    def skipping(weights: jax.Array, x: jax.Array) -> jax.Array:
        skipped = jnp.zeros_like(x)
        for inner, outer in weights:
            x = jnp.tanh(x @ inner)
            skipped = skipped + x @ outer
        return jnp.tanh(jnp.tanh(skipped) @ weights[0, 0])

    plan = plan_of(skipping, "auto_mixed_bf16")(np.stack([W] * layers), X)
    sums = [d for d in plan.decisions() if d.primitive == "add"]
    assert sum(d.output is Precision.BF16 for d in sums) == stored


@pytest.mark.parametrize(
    ("scores", "shape", "stored"),
    [
        ("tshd,hd->tsh", (8, 4), Precision.F32),
        ("tshd,hde->tshe", (8, 4, 4), Precision.BF16),
        ("tshd,de->tshe", (4, 4), Precision.BF16),
    ],
)
def test_what_a_vector_of_each_head_multiplies_is_not_stored(
    scores: str, shape: tuple[int, ...], stored: Precision
) -> None:
    """XLA adds up the terms in the kernel that makes them; a product with a matrix reads memory."""

    def scored(x: jax.Array, vectors: jax.Array) -> jax.Array:
        q, k = ((x @ w).reshape(-1, 8, 4) for w in W)
        pairs = jax.nn.leaky_relu(q[:, None] + k[None])
        weights = jax.nn.softmax(jnp.einsum(scores, pairs, vectors), 1)
        return weights.sum(1).reshape(64, -1)[:, :8] @ W[0, :8]

    arrays = X.reshape(64, 32), np.ones(shape, np.float32)
    decisions = plan_of(scored, "auto_mixed_bf16")(*arrays).decisions()
    (made,) = (d for d in decisions if d.primitive == "select_n")
    assert made.output is stored, made.reason


def test_what_a_matrix_multiplies_as_well_is_stored() -> None:
    """It is in memory for that product, so the vectors' products read it there."""

    def scored(x: jax.Array, vectors: jax.Array, w: jax.Array) -> jax.Array:
        q, k = ((x @ w).reshape(-1, 8, 4) for w in W)
        pairs = jax.nn.leaky_relu(q[:, None] + k[None])
        weights = jax.nn.softmax(jnp.einsum("tshd,hd->tsh", pairs, vectors), 1)
        return jnp.einsum("tsh,tshe->te", weights, pairs @ w)

    arrays = X.reshape(64, 32), np.ones((8, 4), np.float32), np.ones((4, 4), np.float32)
    decisions = plan_of(scored, "auto_mixed_bf16")(*arrays).decisions()
    (made,) = (d for d in decisions if d.primitive == "select_n")
    assert made.output is Precision.BF16, made.reason


def _softmax_of_a_sum(w: jax.Array, x: jax.Array) -> jax.Array:
    """Scores by content and by place, as of Transformer-XL (Dai et al. 2019)."""
    return jax.nn.softmax(x @ w[0] + jnp.roll(x @ w[1], 1, -1)) @ w[0]


def _norm_of_a_sum(w: jax.Array, x: jax.Array) -> jax.Array:
    z = x @ w[0] + (x * 2) @ w[1]
    return (z - z.mean(-1, keepdims=True)) * jax.lax.rsqrt(z.var(-1, keepdims=True) + 1e-5) @ w[0]


def _gates_of_sums(w: jax.Array, x: jax.Array) -> jax.Array:
    """Gates of a recurrence: parts of two products, of which other kernels read the other parts."""
    a, b = jnp.split(x @ w[0], 4, -1), jnp.split((x * 2) @ w[1], 4, -1)
    return sum(jnp.tanh(c + d) for c, d in zip(a, b, strict=True)) @ w[0, :8]


def _parts_of_a_sum(w: jax.Array, x: jax.Array) -> jax.Array:
    """Gates of an LSTM, which a loop keeps as they are."""
    return sum(map(jnp.tanh, jnp.split(x @ w[0] + (x * 2) @ w[1], 4, -1))) @ w[0, :8]


@pytest.mark.parametrize(
    ("fn", "is_stored"),
    [
        (_softmax_of_a_sum, True),
        (_norm_of_a_sum, True),
        (_gates_of_sums, False),
        (_parts_of_a_sum, False),
    ],
)
def test_a_sum_of_arrays_that_a_curve_reads_is_stored(
    fn: Callable[[jax.Array, jax.Array], jax.Array], is_stored: bool
) -> None:
    """Its derivative, and a norm's later passes, then read one array in place of several."""
    decisions = plan_of(lambda w, x: jnp.tanh(fn(w, x)), "auto_mixed_bf16")(W, X).decisions()
    first = next(d for d in decisions if d.primitive == "add")
    assert (first.output is Precision.BF16) == is_stored, first.reason


def _normalized(curve: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        y = curve(x @ w[0])
        y = (y - y.mean((0, 1))) * jax.lax.rsqrt(y.var((0, 1)) + 1e-5)
        return y @ w[1]

    return layer


CURVES = {"gelu": jax.nn.gelu, "silu": jax.nn.silu, "tanh": jnp.tanh, "softplus": jax.nn.softplus}


@pytest.mark.parametrize(
    ("curve", "is_stored"), [("gelu", True), ("silu", True), ("tanh", False), ("softplus", False)]
)
def test_what_a_curve_gates_is_stored_before_a_norm_of_channels(
    curve: str, is_stored: bool
) -> None:
    """XLA stores the curve in float32 for the sums; but a rounded bound would lose what varies."""
    program = plan_of(_normalized(CURVES[curve]), "auto_mixed_bf16")(W, X)
    products = [d for d in program.decisions() if d.primitive == "mul"]
    made = [d for d in products if d.output is Precision.BF16]  # the norm's result is one
    assert len(made) == 1 + is_stored, [(d.primitive, d.reason) for d in made]


@pytest.mark.parametrize("policy", ["auto_mixed_bf16", "auto_mixed"])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("mean", [0, 30])
def test_a_norm_of_what_a_curve_gates_is_as_accurate_as_rounded_products(
    curve: str, mean: float, policy: str
) -> None:
    """Of channels far from zero the products' own rounding is as large."""
    w, x = (np.random.default_rng(0).normal(size=a.shape).astype(np.float32) for a in (W, X))
    low = jnp.bfloat16 if policy == "auto_mixed_bf16" else jnp.float16
    fn = _normalized(CURVES[curve])
    shifted = jnp.concatenate([w[:1] + (mean / 32) * np.sign(x[:1, :1].T), w[1:]])
    exact = jax.jit(fn)(shifted, x)
    allowed = 2 * np.linalg.norm(jax.jit(products_rounded(fn, low))(shifted, x) - exact)
    assert np.linalg.norm(jax.jit(amp(fn, policy))(shifted, x) - exact) <= allowed
