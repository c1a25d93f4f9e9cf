"""Gradients beside those of programs in which only operands of products are rounded."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import ad

from jaxamp import amp, plan_of
from jaxamp.core.formats import Precision
from jaxamp.rewrite.primitives.accumulate import accumulate_p
from tests.numerics.oracle import products_rounded
from tests.programs.registry import Draw

ROWS, WIDTH, HIDDEN = 16, 8, 12
LOW = {"auto_mixed_bf16": jnp.bfloat16, "auto_mixed": jnp.float16}
DRAW = Draw("gradients")
X = DRAW.normal(ROWS, WIDTH)
W, GATE = DRAW.normal(WIDTH, HIDDEN), DRAW.normal(WIDTH, HIDDEN)
BIAS = DRAW.normal(HIDDEN)
OUT = DRAW.weight(HIDDEN, WIDTH)
W32 = DRAW.weight(WIDTH, 64)
SEGMENTS = np.arange(ROWS) // 4

Body = Callable[[jax.Array], jax.Array]


def rolled(x: jax.Array) -> jax.Array:
    z = x @ W
    return jnp.maximum(z + jnp.roll(z, 1, -1), 0)


def residual(x: jax.Array) -> jax.Array:
    h = jnp.maximum(x @ W, 0)
    return jnp.maximum(h + (h @ OUT) @ W, 0)


EXTREMA: dict[str, Body] = {
    "maximum": lambda x: jnp.maximum(x @ W + x @ GATE, 0),
    "minimum": lambda x: jnp.minimum(x @ W + x @ GATE, 0),
    "clip": lambda x: jnp.clip(x @ W + x @ GATE, 0, 6),
    "gated": lambda x: jnp.maximum((x @ W) * jax.nn.sigmoid(x @ GATE), 0),
    "maxout": lambda x: jnp.maximum(x @ W + BIAS, x @ GATE),
    "rolled": rolled,
    "residual": residual,
    "over_an_axis": lambda x: jnp.max((x @ W + x @ GATE).reshape(4, 4, HIDDEN), axis=1),
    "cummax": lambda x: lax.cummax(x @ W + x @ GATE, 1),
    "segment_max": lambda x: jax.ops.segment_max(x @ W + x @ GATE, SEGMENTS, 4),
}


def sums(x: jax.Array) -> jax.Array:
    return jnp.cumsum(jax.nn.softmax(x @ W / 3), -1)


def differences(x: jax.Array) -> jax.Array:
    return jnp.log(x[:, 1:] - x[:, :-1])


def padded(x: jax.Array) -> jax.Array:
    return jnp.pad(sums(x), ((0, 0), (1, 0)))


def with_ends(x: jax.Array) -> jax.Array:
    return differences((6 * padded(x) - 3).at[:, 0].set(-3.0).at[:, -1].set(3.0))


def rolled_differences(x: jax.Array) -> jax.Array:
    return jnp.log(jnp.abs(sums(x) - jnp.roll(sums(x), 1, -1)))


NEIGHBOURS: dict[str, Body] = {
    "padded": lambda x: differences(padded(x)),
    "concatenated": lambda x: differences(jnp.concatenate([jnp.zeros((ROWS, 1)), sums(x)], -1)),
    "scaled": lambda x: differences(6 * padded(x) - 3),
    "with_ends": with_ends,
    "rolled": rolled_differences,
}


def drawdown(x: jax.Array) -> jax.Array:
    c = jnp.cumsum(x @ W + 1, 0)
    return jnp.tanh(c - lax.cummax(c, 0))


def in_log_space(x: jax.Array) -> jax.Array:
    long = jnp.concatenate([x, -x, x[::-1], -x[::-1]])
    c = jnp.cumsum(jax.nn.log_sigmoid(long @ W / 2), 0)
    return jnp.exp(c + lax.cumlogsumexp(long @ GATE / 2 - c, 0))


def by_hand(x: jax.Array) -> jax.Array:
    c = jnp.cumsum(jax.nn.log_sigmoid(x @ W / 2), 0)
    return jnp.exp(c + jnp.log(jnp.cumsum(jnp.exp(x @ GATE / 2 - c), 0)))


def thresholded(x: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ W) + 10
    return jnp.maximum(h - lax.top_k(h, 4)[0][:, -1:], 0)


def without_slow_waves(x: jax.Array) -> jax.Array:
    h = jax.nn.softplus(x @ W) + 20
    return h - jnp.fft.irfft(jnp.fft.rfft(h, axis=0).at[3:].set(0), ROWS, axis=0)


APART: dict[str, Body] = {
    "drawdown": drawdown,
    "in_log_space": in_log_space,
    "by_hand": by_hand,
    "thresholded": thresholded,
    "without_slow_waves": without_slow_waves,
}


def loss(body: Body, x: jax.Array) -> jax.Array:
    return jnp.mean((body(x) @ OUT) ** 2)


def check(body: Body, policy: str, order: str) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return loss(body, x)

    exact = jax.jit(jax.grad(fn))(X)
    rounded = jax.jit(products_rounded(jax.grad(fn), LOW[policy]))(X)
    mixed = amp(jax.grad(fn), policy) if order == "amp(grad(f))" else jax.grad(amp(fn, policy))
    allowed = 4 * np.linalg.norm(rounded - exact) + 1e-6
    assert np.linalg.norm(jax.jit(mixed)(X) - exact) <= allowed


@pytest.mark.product("name")
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", EXTREMA)
def test_extrema_are_equal_to_one_of_their_operands(name: str, policy: str, order: str) -> None:
    """JAX asks which operand a maximum is equal to: a rounded one would be equal to none."""
    check(EXTREMA[name], policy, order)


@pytest.mark.product("name")
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_differences_of_neighbours_are_of_unrounded_sums(
    name: str, policy: str, order: str
) -> None:
    """The bins of a spline: sums of a softmax, padded, scaled, and told apart again."""
    check(NEIGHBOURS[name], policy, order)


@pytest.mark.product("name", every=2)
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", APART)
def test_what_cancels_is_rounded_in_neither_place(name: str, policy: str, order: str) -> None:
    """A value, and what a kernel or a scan has made of it: root mean squares of six gradients."""

    def fn(x: jax.Array) -> jax.Array:
        return loss(APART[name], x)

    mixed = amp(jax.grad(fn), policy) if order == "amp(grad(f))" else jax.grad(amp(fn, policy))
    gradients = [jax.grad(fn), mixed, products_rounded(jax.grad(fn), LOW[policy])]
    inputs = jax.random.normal(jax.random.key(5), (6, *X.shape))
    exact, found, rounded = (np.stack([jax.jit(g)(x) for x in inputs]) for g in gradients)
    scale = np.linalg.norm(exact, axis=(1, 2), keepdims=True)
    assert np.linalg.norm((found - exact) / scale) <= 3 * np.linalg.norm((rounded - exact) / scale)


def increment(z: jax.Array, w: jax.Array) -> jax.Array:
    return 1.5 * jnp.tanh(z @ w[0]) @ w[1]


def written_out(step: Callable[..., Any], state: Any, ws: Any, *, reverse: bool = False) -> Any:
    made = []
    for w in ws[::-1] if reverse else ws:
        state, out = step(state, w)
        made.append(out)
    return state, jnp.stack(made[::-1])


def reversible(loop: Callable[..., Any], x: jax.Array, ws: jax.Array) -> jax.Array:
    """Pairs of layers; their backward rule computes what they read anew, from their results."""

    def add(state: Any, w: jax.Array) -> Any:
        for one in w:
            state = state[1], state[0] + increment(state[1], one)
        return state, jnp.zeros(())

    @jax.custom_vjp
    def layers(state: Any, ws: Any) -> Any:
        return loop(add, state, ws)[0]

    def forward(state: Any, ws: Any) -> Any:
        state = layers(state, ws)
        return state, (state, ws)

    def subtract(now: Any, w: jax.Array) -> Any:
        (read, made), (of_read, of_made) = now
        of_w = []
        for one in w[::-1]:
            added, pull = jax.vjp(increment, read, one)
            more, of_one = pull(of_made)
            read, made, of_read, of_made = made - added, read, of_made, of_read + more
            of_w.append(of_one)
        return ((read, made), (of_read, of_made)), jnp.stack(of_w[::-1])

    def backward(saved: Any, cotangents: Any) -> Any:
        state, ws = saved
        (_, given), of_ws = loop(subtract, (state, cotangents), ws, reverse=True)
        return given, of_ws

    layers.defvjp(forward, backward)
    return jnp.concatenate(layers(tuple(jnp.split(x @ W32, 2, -1)), ws), -1)


@pytest.mark.product("order")
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize("loop", [lax.scan, written_out])
def test_what_is_undone_in_the_backward_pass_is_not_rounded(
    loop: Callable[..., Any], order: str
) -> None:
    """A reversible network: what is left of each sum has the rounding of all sums behind it."""
    draw = Draw("reversible")
    ws = jnp.stack([draw.weight(32, 32) for _ in range(32)]).reshape(8, 2, 2, 32, 32)

    def fn(ws: jax.Array) -> jax.Array:
        return jnp.mean((reversible(loop, X, ws) @ W32.T) ** 2)

    mixed = amp(jax.grad(fn)) if order == "amp(grad(f))" else jax.grad(amp(fn))
    gradients = [jax.grad(fn), mixed, products_rounded(jax.grad(fn), jnp.bfloat16)]
    exact, found, rounded = (jax.jit(g)(ws) for g in gradients)
    assert np.linalg.norm(found - exact) <= 1.5 * np.linalg.norm(rounded - exact)


@pytest.mark.parametrize("name", ["padded", "scaled"])
def test_both_orders_keep_what_cancels(name: str) -> None:
    """Where some bins are narrow, cotangents of neighbours differ by little of what they are."""

    def peaked(x: jax.Array) -> jax.Array:
        return loss(NEIGHBOURS[name], 2.5 * x)

    exact = jax.jit(jax.grad(peaked))(X)
    inside, around = (
        np.linalg.norm(jax.jit(mixed)(X) - exact)
        for mixed in (jax.grad(amp(peaked)), amp(jax.grad(peaked)))
    )
    assert around <= 1.5 * inside


def test_differences_of_sorted_numbers_stay_finite() -> None:
    """Of probabilities whose logits are different numbers of bfloat16."""
    logits = (np.arange(ROWS)[:, None] + 5 * np.arange(HIDDEN)) % HIDDEN / np.float32(8)

    def gaps(x: jax.Array) -> jax.Array:
        return jnp.log(jnp.diff(jnp.sort(jax.nn.softmax(x @ jnp.eye(HIDDEN))))) @ OUT[1:]

    assert jnp.isfinite(gaps(logits)).all()
    assert jnp.isfinite(amp(gaps)(logits)).all()


@pytest.mark.parametrize("policy", LOW)
def test_what_only_a_mask_or_an_index_is_made_of_is_not_rounded(policy: str) -> None:
    """The bin that a number is in, found among sums of a softmax."""

    def bins(x: jax.Array) -> jax.Array:
        above = x[:, :1] >= padded(x)[:, 1:]
        return jnp.where(above, 1.0, 0.5) @ OUT

    decisions = plan_of(bins, policy)(X).decisions()
    (summed,) = [d for d in decisions if d.primitive == "cumsum"]
    assert summed.output is Precision.F32


@pytest.mark.parametrize("policy", LOW)
def test_small_numbers_are_not_zero(policy: str) -> None:
    """A mask of padding, `x != 0`, of what is stored narrow: float16 has subnormal numbers."""

    def masked(x: jax.Array) -> jax.Array:
        h = x @ jnp.eye(WIDTH)
        return jnp.where(h != 0, 1.0, 0.0) @ jnp.eye(WIDTH) + h @ jnp.eye(WIDTH)

    x = jnp.array([[0.0, 1e-6, -1e-6, 1.0] * 2])
    np.testing.assert_array_equal(jnp.round(amp(masked, policy)(x)), jnp.round(masked(x)))


def test_a_product_is_linearized_by_a_rule_of_its_own(monkeypatch) -> None:
    """JAX would else evaluate its JVP in part, for each product again."""
    product = amp(lambda x, w: x @ w, "bf16")
    wanted = [jax.jvp(product, (X, W), along) for along in ((X, W), (0 * X, W), (X, 0 * W))]
    monkeypatch.delitem(ad.primitive_jvps, accumulate_p)
    value, along = jax.linearize(product, X, W)
    ways = along(X, W), jax.linearize(partial(product, X), W)[1](W)
    ways += (jax.linearize(lambda x: product(x, W), X)[1](X),)
    for found, (right, tangent) in zip(ways, wanted, strict=True):
        np.testing.assert_array_equal(value, right)
        np.testing.assert_array_equal(found, tangent)


def _jvp(make: Callable[..., Any]) -> Any:
    """A function of the number 2 whose rule of derivatives makes a factor of it."""
    scaled = jax.custom_jvp(lambda x, n: x @ x * n)
    scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0] * make(primals[1])))
    return scaled


def _vjp(make: Callable[..., Any]) -> Any:
    scaled = jax.custom_vjp(lambda x, n: x @ x * n)
    scaled.defvjp(lambda x, n: (x @ x * n, make(n)), lambda made, g: (g * made, None))
    return scaled


@pytest.mark.parametrize("kind", [_jvp, _vjp])
@pytest.mark.parametrize(
    "make", [int, jnp.ones, lambda n: sum(range(n)), lambda n: n if n > 1 else 1]
)
def test_a_rule_that_wants_numbers(kind: Callable[..., Any], make: Callable[..., Any]) -> None:
    """It gets them in ``amp(grad(f))``; the error of ``grad(amp(f))``, which is JAX's, says so."""
    scaled = kind(lambda n: jnp.sum(make(n)))
    f, x = lambda x: scaled(jnp.tanh(x @ x), 2).sum(), jnp.eye(4)
    np.testing.assert_allclose(amp(jax.grad(f))(x), jax.grad(f)(x), rtol=1e-2)
    for gradient in (jax.grad(amp(f)), jax.jit(jax.grad(amp(f)))):
        with pytest.raises(TypeError) as found:
            gradient(x)
        assert "amp(jax.grad(f))" in "".join(found.value.__notes__)


def test_a_gradient_that_is_factored() -> None:
    """The product that makes it is float32, and reads the copy that the others read of a region."""
    x, w, v = (jnp.asarray(Draw(n).normal(16, 16), jnp.float32) / 4 for n in "xwv")

    def f(v: Any) -> Any:
        grads = jax.grad(lambda v, w: jnp.mean((jnp.tanh(x @ w) @ v) ** 2), (0, 1))(v, w)
        return jnp.linalg.svd(grads[0], compute_uv=False), grads

    for got, exact in zip(jax.tree.leaves(amp(f)(v)), jax.tree.leaves(f(v)), strict=True):
        np.testing.assert_allclose(got, exact, rtol=0, atol=2e-2 * float(jnp.abs(exact).max()))
