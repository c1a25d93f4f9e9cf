"""What is stored around norms whose statistics are sums over rows, or of what is a sum itself."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxamp import Precision, amp, plan_of
from jaxamp.plan import Decision
from tests.audit import equations
from tests.programs.registry import Draw
from tests.scopes import equations_of

IMAGES, SIDE, WIDTH = 4, 6, 16
DRAW = Draw("norm storage")
X = DRAW.normal(IMAGES, SIDE, SIDE, WIDTH)
W = DRAW.normal(3, WIDTH, WIDTH, scale=WIDTH**-0.5)
SCALE, SHIFT = 1 + DRAW.normal(2, WIDTH, scale=1 / 9)
POLICY = "auto_mixed_bf16"

Function = Callable[[jax.Array], jax.Array]


def layer_norm(x: jax.Array) -> jax.Array:
    variance = jnp.mean((x - x.mean(-1, keepdims=True)) ** 2, -1, keepdims=True)
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(variance + 1e-5) * SCALE + SHIFT


def batch_norm(x: jax.Array) -> jax.Array:
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * SCALE + SHIFT


def block(activation: Function) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((activation(batch_norm(x @ w[0])) @ w[1]) ** 2)

    return loss


def weighted(w: jax.Array, x: jax.Array) -> jax.Array:
    """Channels are weighted by what their means say (Hu et al. 2018)."""
    hidden = jax.nn.silu(x @ w[0])
    weights = jax.nn.sigmoid(hidden.mean((1, 2)) @ w[1])
    return (hidden * weights[:, None, None]) @ w[2]


def named(decisions: list[Decision], name: str) -> list[Decision]:
    return [d for d in decisions if d.eqn.primitive.name == name]


def test_a_norm_of_a_sum_keeps_the_sum() -> None:
    """Forward and backward are made of it: one array, rather than each difference from a mean."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        h = layer_norm(x @ w[0])
        return jnp.mean((layer_norm(h + jax.nn.gelu(h @ w[1])) @ w[2]) ** 2)

    decisions = [*plan_of(jax.grad(loss), POLICY)(W, X).decisions()]
    assert {d.output for d in named(decisions, "sub")} == {Precision.F32}
    assert Precision.BF16 in {d.output for d in named(decisions, "add")}


def test_what_is_dear_and_read_again_after_its_mean_is_stored_narrow() -> None:
    """XLA makes an exponential once, and would store it in float32."""
    decisions = [*plan_of(weighted, POLICY)(W, X).decisions()]
    (mean,) = named(decisions, "reduce_sum")
    (maker,) = [d for d in decisions if mean.eqn.invars[0] in d.eqn.outvars]
    assert maker.output is Precision.BF16


@pytest.mark.feature("xla")
@pytest.mark.parametrize(("activation", "roundings"), [(jax.nn.silu, 1), (jax.nn.relu, 0)])
def test_the_cotangent_of_a_batch_norm_is_rounded_where_it_is_dear(
    activation: Function, roundings: int
) -> None:
    """It is folded over rows, and read once more; a rectifier's is made again for nothing."""
    decisions = [*plan_of(block(activation), POLICY)(W, X).decisions()]
    assert len([d for d in decisions if d.plan.hints.cotangent_rounding]) == roundings


@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.relu])
def test_such_gradients_are_close_to_float32(activation: Function) -> None:
    loss = block(activation)
    exact, found = jax.grad(loss)(W, X), jax.grad(amp(loss, POLICY))(W, X)
    assert jnp.linalg.norm(found - exact) < 0.02 * jnp.linalg.norm(exact)


def is_of_rows(eqn: Any) -> bool:
    return eqn.primitive.name == "reduce_sum" and eqn.invars[0].aval.shape == X.shape


def test_statistics_of_rows_are_not_computed_again() -> None:
    """Also where a function of JAX's computes them, as `var` does: each is a pass over memory."""
    loss = block(jax.nn.relu)
    again = [
        eqn
        for eqn, path in equations_of(jax.grad(amp(loss, POLICY)), W, X)
        if is_of_rows(eqn) and "rematted_computation" in path
    ]
    assert not again
    plain, low = (
        sum(map(is_of_rows, equations(jax.make_jaxpr(fn)(W, X).jaxpr)))
        for fn in (jax.grad(loss), amp(jax.grad(loss), POLICY))
    )
    assert low <= plain


@pytest.mark.feature("xla")
def test_the_largest_of_a_column_is_found_once() -> None:
    """Computed again for the backward pass, it may differ from itself in the last bit."""
    key, other = jax.random.split(jax.random.key(1))
    points, w = jax.random.normal(key, (8, 128, 3)), jax.random.normal(other, (3, 64))

    def pooled(w: jax.Array, x: jax.Array) -> jax.Array:
        hidden = x @ w
        mean, variance = hidden.mean((0, 1)), hidden.var((0, 1))
        normal = (hidden - mean) * jax.lax.rsqrt(variance + 1e-5) * 1.1 + 0.1
        return jnp.mean((jax.nn.relu(normal).max(1) @ w.T) ** 2)

    steps = plan_of(jax.grad(pooled), POLICY)(w, points).body.steps
    fusions = [step.fusion for step in steps if not isinstance(step, int)]
    again = {e.primitive.name for f in fusions for e in f.equations[: f.recomputed]}
    assert "custom_jvp_call" in again
    assert "eq" not in again
    exact, got = jax.grad(pooled)(w, points), amp(jax.grad(pooled), POLICY)(w, points)
    assert jnp.linalg.norm(got - exact) < 0.1 * jnp.linalg.norm(exact)


def distances(w: jax.Array, points: jax.Array) -> jax.Array:
    rows = X[0, 0] @ w
    apart = (points[:, None] - rows) * jnp.exp(rows)
    return jnp.mean((jnp.tanh(apart.sum(1)) @ w) ** 2)


def member(w: jax.Array, bias: jax.Array) -> jax.Array:
    return jnp.mean((jnp.exp(X[0, 0] @ w - bias) @ w) ** 2)


@pytest.mark.parametrize(
    ("fn", "axes"), [(distances, None), (member, (None, 0))], ids=["distances", "an ensemble"]
)
def test_the_activation_of_a_sum_may_be_broadcast_too(fn: Any, axes: Any) -> None:
    def mapped(fn: Any) -> Any:
        return fn if axes is None else lambda w, x: jnp.mean(jax.vmap(fn, axes)(w, x))

    expected = jax.grad(mapped(fn))(W[0], X[0, 1])
    found = jax.grad(mapped(amp(fn, POLICY)))(W[0], X[0, 1])
    assert jnp.linalg.norm(found - expected) < 0.03 * jnp.linalg.norm(expected)
