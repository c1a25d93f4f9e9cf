"""Results of quantized dots are stored in 16 bits, whoever reads them, unless nothing is gained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp import Precision, PrecisionPolicy, amp, plan_of
from tests.quantized.lowp.models import policy

CURRENT = policy("fp8_current")
W, X = jnp.ones((64, 32)), jnp.ones((16, 64))


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def update(w, x):
    """The optimizer is elementwise arithmetic that reads the gradient."""
    return w - 0.1 * jax.grad(loss)(w, x)


def updates(ws, x):
    """Gradients of a loop's parameters are stacked before they are read."""

    def looped(ws):
        y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, ws)
        return jnp.mean(y**2)

    return ws - 0.1 * jax.grad(looped)(ws)


def distances(w, x):
    """The numbers of the product nearly cancel."""
    squares = jnp.sum(x**2, 1)[:, None] + jnp.sum(w**2, 0)
    return squares - 2 * (x @ w)


def stored(fn, chosen, *args):
    """In what each dot's result is stored, in order."""
    decisions = plan_of(fn, chosen)(*args).decisions()
    dots = [d for d in decisions if d.primitive == "dot_general"]
    assert all(d.plan.form is not None for d in dots) == chosen.is_scaled
    return [d.outputs[0] for d in dots]


@pytest.mark.parametrize(
    ("fn", "args"), [(update, (W, X)), (updates, (jnp.ones((3, 64, 64)), X))], ids=["step", "scan"]
)
def test_a_gradient_that_an_optimizer_reads(fn, args):
    """In bf16 it is in float32, as its operands are finer."""
    plain = PrecisionPolicy.MIXED_BF16
    scaled, unscaled = stored(fn, CURRENT, *args), stored(fn, plain, *args)
    changed = [pair for pair in zip(unscaled, scaled, strict=True) if pair[0] is not pair[1]]
    assert changed == [(Precision.F32, Precision.BF16)]


def test_what_leaves_the_program_stays_in_float32():
    """A kernel would only widen it."""
    assert stored(jax.grad(loss), CURRENT, W, X)[-1] is Precision.F32
    assert stored(jnp.dot, CURRENT, X, W) == [Precision.F32]


def test_what_cancels_is_not_quantized():
    """Its rounding would be amplified, as the plan has found."""
    (product,) = [
        d for d in plan_of(distances, CURRENT)(W, X).decisions() if d.kind.value == "Compute"
    ]
    assert product.operand is Precision.F32


def test_what_a_loop_adds_up_stays_in_float32():
    """The sum goes around the loop as it is."""

    def accumulated(w, xs):
        return jax.lax.scan(lambda _, x: (x @ w, None), jnp.zeros((16, 32)), xs)[0] * 2

    assert stored(accumulated, CURRENT, W, jnp.ones((4, 16, 64))) == [Precision.F32]


def test_the_reason_is_told():
    """Only where the rounding is one that bf16 would not make: of the gradient here."""
    reasons = [
        d.reason for d in plan_of(update, CURRENT)(W, X).decisions() if d.plan.form is not None
    ]
    assert ["result in bf16" in reason for reason in reasons].count(True) == 1


def test_one_more_rounding_costs_nothing_beside_those_of_the_operands():
    """The error of an update is that of the gradient alone, whose result nobody rounds."""
    keys = jax.random.split(jax.random.key(0))
    w, x = jax.random.normal(keys[0], (64, 32)) / 8, jax.random.normal(keys[1], (512, 64))
    with jax.enable_x64(True):
        exact = np.asarray(jax.grad(loss)(w.astype(jnp.float64), x.astype(jnp.float64)))
    alone = jax.jit(amp(jax.grad(loss), CURRENT))(w, x)
    rounded = (w - jax.jit(amp(update, CURRENT))(w, x)) * 10
    error, wide = (np.linalg.norm(g - exact) for g in (rounded, alone))
    assert error == pytest.approx(wide, rel=0.02)
