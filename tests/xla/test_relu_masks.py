"""What is cut off at zero is compared there as it is stored, and no number changes."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import PrecisionPolicy, amp
from jaxamp.xla.relu_masks import compare_relu_results
from tests.audit import equations

BF16 = PrecisionPolicy.AUTO_MIXED_BF16
SPECIAL = jnp.float32([-jnp.inf, -1, -1e-45, -0.0, 0.0, 1e-45, 1e-30, 1, jnp.inf, jnp.nan])


def by_hand(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    cut = jnp.maximum(0.0, x)
    return cut, x > 0, jnp.where(x <= 0, 0.0, 1.0)


def differentiated(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.jvp(jax.nn.relu, (x,), (2 * jnp.ones_like(x),))


def called(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.jit(jax.jit(lambda x: (jax.nn.relu(x), x > 0)))(x)


def scanned(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return jax.lax.scan(lambda carry, x: (carry + 1, called(x)), 0.0, x)


CUT_OFF = {
    "by_hand": by_hand,
    "differentiated": differentiated,
    "called": called,
    "scanned": scanned,
    "branch": lambda x: jax.lax.cond(x.sum() > 3, by_hand, lambda x: by_hand(-x), x),
    "whole": lambda x: (jnp.maximum(n := jnp.int32(jnp.nan_to_num(x)), 0), n > 0),
}
OTHERS = {
    "cut_off_at_one": lambda x: (jnp.maximum(x, 1.0), x > 1),
    "compared_with_one": lambda x: (jnp.maximum(x, 0.0), x > 1),
    "the_other_side": lambda x: (jnp.maximum(x, 0.0), x < 0),
    "least": lambda x: (jnp.minimum(x, 0.0), x > 0),
    "compared_before": lambda x: (x > 0, jnp.maximum(x, 0.0)),
    "another_value": lambda x: (jnp.maximum(x + 1, 0.0), x > 0),
}


@pytest.mark.parametrize("name", [*CUT_OFF, *OTHERS])
def test_no_bit_changes(name: str) -> None:
    fn = {**CUT_OFF, **OTHERS}[name]
    before = jax.make_jaxpr(fn)(SPECIAL)
    after = compare_relu_results(before)
    pairs = zip(
        jax.core.eval_jaxpr(before.jaxpr, before.consts, SPECIAL),
        jax.core.eval_jaxpr(after.jaxpr, after.consts, SPECIAL),
        strict=True,
    )
    assert all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs)


@pytest.mark.parametrize("name", CUT_OFF)
def test_the_result_is_compared(name: str) -> None:
    after = compare_relu_results(jax.make_jaxpr(CUT_OFF[name])(SPECIAL))
    eqns = list(equations(after.jaxpr))
    cut_off = {
        id(v) for e in eqns if e.primitive.name in ("max", "custom_jvp_call") for v in e.invars
    }
    compared = [e for e in eqns if e.primitive.name in ("gt", "le")]
    assert compared
    assert not any(id(eqn.invars[0]) in cut_off for eqn in compared)


def test_calls_of_one_function_stay_calls_of_one() -> None:
    """Else each would be compiled by itself."""
    layer = jax.jit(lambda x: (jax.nn.relu(x), x > 0))

    def two_layers(x: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        return [layer(x), layer(x + 1)]

    after = compare_relu_results(jax.make_jaxpr(two_layers)(SPECIAL))
    first, second = (e.params["jaxpr"] for e in after.jaxpr.eqns if e.primitive.name == "jit")
    assert first is second


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_left_alone(name: str) -> None:
    before = jax.make_jaxpr(OTHERS[name])(SPECIAL)
    assert compare_relu_results(before) is before


def block(x: jax.Array, w: jax.Array) -> jax.Array:
    """Residual blocks: what is cut off is made of two stored arrays."""
    for _ in range(DEPTH):
        x = jax.nn.relu(x + x @ w)
    return jnp.sum((x @ w) ** 2)


@jax.custom_jvp
def own(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0.0)


@own.defjvp
def _own_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (t,) = primals, tangents
    return jnp.maximum(x, 0.0), jnp.where(x > 0, t, 0.0)


def own_block(x: jax.Array, w: jax.Array) -> jax.Array:
    for _ in range(DEPTH):
        x = own(x + x @ w)
    return jnp.sum((x @ w) ** 2)


DEPTH = 4


@pytest.fixture
def args() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return jnp.float32(rng.normal(size=(6, 8))), jnp.float32(rng.normal(size=(8, 8)) / 4)


@pytest.mark.parametrize("fn", [block, own_block])
def test_a_backward_pass_needs_one_array_of_each_block(
    fn: Callable[..., jax.Array], args: tuple[jax.Array, jax.Array]
) -> None:
    """By hand it is the same: the next product needs what was cut off, and so does the mask."""
    _, pullback = jax.vjp(amp(fn, BF16), *args)
    saved = [a for a in jax.tree.leaves(pullback) if getattr(a, "shape", ()) == args[0].shape]
    narrow = [a for a in saved if a.dtype == jnp.bfloat16]
    # The first block's input and product, which its mask is made of; then one for each block.
    assert len(narrow) <= 2 + DEPTH
    assert not any(np.array_equal(a, b) for i, a in enumerate(narrow) for b in narrow[:i])


@pytest.mark.parametrize("fn", [block, own_block])
@pytest.mark.parametrize("inside", [False, True])
def test_gradients_stay_close(
    fn: Callable[..., jax.Array], inside: bool, args: tuple[jax.Array, jax.Array]
) -> None:
    exact = jax.grad(fn, argnums=(0, 1))(*args)
    grad = partial(jax.grad, argnums=(0, 1))
    found = amp(grad(fn), BF16)(*args) if inside else grad(amp(fn, BF16))(*args)
    for a, b in zip(found, exact, strict=True):
        assert jnp.linalg.norm(a - b) <= 0.02 * jnp.linalg.norm(b)


def test_inside_too_the_result_is_what_later_masks_read(
    args: tuple[jax.Array, jax.Array],
) -> None:
    """The mask of a joined value is computed where it is needed, from what is stored narrow."""
    rewritten = jax.make_jaxpr(amp(jax.grad(block, argnums=1), BF16))(*args)
    read = [
        eqn.invars[0].aval.dtype
        for eqn in equations(rewritten.jaxpr)
        if eqn.primitive.name == "gt" and eqn.invars[0].aval.shape == args[0].shape
    ]
    assert read.count(jnp.bfloat16) >= DEPTH - 1


def test_weights_are_reversed_after_they_are_rounded() -> None:
    """XLA knows the derivative of a strided convolution by the reversal of its operand."""
    x, w = jnp.ones((2, 8, 8, 4)), jnp.full((3, 3, 4, 6), 0.02)  # where tanh has a slope

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jax.lax.conv_general_dilated(
            x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(jnp.tanh(y) ** 2)

    rewritten = jax.make_jaxpr(amp(jax.grad(loss), BF16))(x, w)
    reversals = [e for e in equations(rewritten.jaxpr) if e.primitive.name == "rev"]
    products = [e for e in equations(rewritten.jaxpr) if e.primitive.name == "accumulate"]
    narrow = {e.outvars[0] for e in reversals if e.outvars[0].aval.dtype == jnp.bfloat16}
    assert any(not narrow.isdisjoint(e.invars) for e in products)
    second = jax.grad(lambda w: jnp.sum(amp(jax.grad(loss), BF16)(x, w) ** 2))(w)
    exact = jax.grad(lambda w: jnp.sum(jax.grad(loss)(x, w) ** 2))(w)
    assert jnp.linalg.norm(second - exact) <= 0.02 * jnp.linalg.norm(exact)
