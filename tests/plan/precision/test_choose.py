"""In which precision single operations run, shown by what their derivatives lose."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxamp import PrecisionPolicy, Rule, amp, plan_of
from jaxamp.core.formats import Precision
from tests.programs.registry import Draw
from tests.tolerances import BY_ORDER, CLASSES, EPS

ROWS = 16
DRAW = Draw("operations")
X, W = DRAW.uniform(ROWS, ROWS, low=1e-3, high=2e-3), DRAW.uniform(ROWS, ROWS, low=0.5, high=1)

Program = Callable[[jax.Array, jax.Array], jax.Array]


def quotient(x: jax.Array, w: jax.Array) -> jax.Array:
    """The square of the reciprocal is near 100,000, beyond float16; the derivative is not."""
    return jnp.sum(2.0**-10 / (jnp.exp(jnp.log(x / 6)) @ w) @ w)


def root(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sqrt(jnp.exp(jnp.log(x)) @ w) @ w)


def scaled_by_turns(x: jax.Array, w: jax.Array) -> jax.Array:
    """Rows and columns of a positive matrix, scaled to sums of one."""
    kernel = jnp.exp(-6 * jnp.tanh((x * 1e3) @ w / 10))
    rows = jnp.ones((ROWS, ROWS)) / ROWS
    for _ in range(3):
        columns = (1 / ROWS) / (kernel.T @ rows)
        rows = (1 / ROWS) / (kernel @ columns)
    return jnp.sum(rows * columns)


@pytest.mark.product("program")
@pytest.mark.parametrize("low", ["bfloat16", "float16"])
@pytest.mark.parametrize("program", [quotient, root, scaled_by_turns])
def test_derivatives_of_narrow_operands_are_rounded_once(program: Program, low: str) -> None:
    """JAX derives the equations that `amp` emits: one of several steps has to be in float32."""
    policy = {"bfloat16": "mixed_bf16", "float16": "mixed_f16"}[low]
    got = jax.jit(jax.grad(amp(program, policy=policy)))(X, W)
    with jax.enable_x64(True):
        expected = np.asarray(jax.grad(program)(*(np.asarray(a, np.float64) for a in (X, W))))
    off = np.abs(got - expected).max() / np.abs(expected).max()
    assert off < CLASSES["deep"] * BY_ORDER[1] * EPS[low]


def test_layers_that_follow_a_solution_in_a_stream_are_narrow() -> None:
    def stream(x: jax.Array, w: jax.Array) -> jax.Array:
        h = jnp.linalg.solve(x, x.T)
        for _ in range(3):
            h = h + jnp.tanh(h @ w)
        return h

    decisions = plan_of(stream)(X, W).decisions()
    operands = [d.operand for d in decisions if d.primitive == "dot_general"]
    assert operands[-3:] == [Precision.F32, Precision.BF16, Precision.BF16]


def test_orthogonal_weights_are_narrow() -> None:
    (product,) = (
        d
        for d in plan_of(lambda x, w: x @ jnp.linalg.qr(w)[0])(X, W).decisions()
        if d.primitive == "dot_general"
    )
    assert product.operand is Precision.BF16


@pytest.mark.parametrize(
    "policy",
    [
        PrecisionPolicy.ALWAYS_F16,
        PrecisionPolicy.MIXED_BF16.with_rules(Rule(precision="bf16", primitive="dot_general")),
    ],
    ids=["always", "rule"],
)
def test_an_explicit_precision_is_kept_where_nothing_is_added_up(policy: PrecisionPolicy) -> None:
    """An outer product is planned as what multiplies elementwise, but not where it has its own."""

    def outer(x: jax.Array, y: jax.Array, precision: lax.PrecisionLike = None) -> jax.Array:
        return lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision=precision)

    column, row = X[:, :1], W[:1]
    (own,) = plan_of(lambda x, y: outer(x, y, "highest"), policy)(column, row).decisions()
    assert "an explicit precision was requested" in own.reason
    assert not own.is_narrow
    (plain,) = plan_of(outer, policy)(column, row).decisions()
    assert plain.is_narrow


def test_layers_of_a_small_network_are_narrow_in_both_passes() -> None:
    """An actor and its critic, 64 wide, under PPO's loss: no half of a layer stays in float32."""
    draw = Draw("actor")
    sizes = [(4, 64), (64, 64), (64, 2)], [(4, 64), (64, 64), (64, 1)]
    params = [[draw.weight(*size) for size in each] for each in sizes]
    old, gain = draw.normal(128), draw.normal(128)

    def head(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in weights[:-1]:
            x = jnp.tanh(x @ w)
        return x @ weights[-1]

    def loss(params: list[list[jax.Array]], seen: jax.Array) -> jax.Array:
        chances, values = jax.nn.log_softmax(head(params[0], seen)), head(params[1], seen)[:, 0]
        ratio = jnp.exp(chances[:, 0] - old)
        clipped = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()
        entropy = -(jnp.exp(chances) * chances).sum(-1).mean()
        return 0.5 * ((values - gain) ** 2).mean() - clipped - 0.01 * entropy

    decisions = plan_of(jax.grad(loss))(params, draw.normal(128, 4)).decisions()
    products = [d for d in decisions if d.kind.value == "Compute"]
    assert len(products) == 15  # a single value's cotangent is multiplied elementwise
    assert {d.operand for d in products} == {Precision.BF16}
