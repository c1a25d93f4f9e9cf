"""A checkpoint has no barrier before what it recomputes where no forward pass is beside it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxamp
from tests.scopes import equations_of

WEIGHTS, X = jnp.ones((3, 8, 8)), jnp.ones((4, 8))


def _layer(x, w):
    return jnp.tanh(x @ w)


def _scanned(weights, x):
    return lax.scan(lambda x, w: (jax.checkpoint(_layer)(x, w), None), x, weights)[0].sum()


def _written_out(weights, x):
    for w in weights:
        x = jax.checkpoint(_layer)(x, w)
    return x.sum()


def _beside_itself(weights, x):
    """A carry that is read beside the checkpoint: its recomputation has it alone."""

    def step(x, w):
        return x + jax.checkpoint(_layer)(x, w), None

    return lax.scan(step, x, weights)[0].sum()


def _of_micro_batches(weights, x):
    """Each iteration has a forward pass and its recomputation."""

    def step(total, x):
        return total + jax.grad(_written_out)(weights, x), None

    return lax.scan(step, jnp.zeros_like(weights), jnp.stack([x, x]))[0].sum()


@jax.checkpoint
def _twice(x, w):
    return jax.checkpoint(_layer)(jnp.sin(x), w)


def _nested(weights, x):
    return lax.scan(lambda x, w: (_twice(x, w), None), x, weights)[0].sum()


def _barriers(fn, order, policy=jaxamp.PrecisionPolicy.MIXED_BF16):
    """Whether each checkpoint of the backward pass has a barrier."""
    if order == "grad(amp(f))":
        made = jax.grad(jaxamp.amp(fn, policy))
    else:
        made = jaxamp.amp(jax.grad(fn), policy)
    return _found(made)


def _found(made):
    equations = [eqn for eqn, _ in equations_of(made, WEIGHTS, X)]
    params = [eqn.params for eqn in equations if eqn.primitive.name == "remat2"]
    return [p["prevent_cse"] for p in params if p["differentiated"]]


@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
def test_a_backward_loop_has_no_forward_pass(order):
    """In a loop that is differentiated as a whole no checkpoint has a barrier."""
    for fn in (_scanned, _beside_itself):
        assert _barriers(fn, order) == [False]
    assert _barriers(_scanned, order, jaxamp.PrecisionPolicy.MIXED_BF16.replace(xla=())) == [True]


@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
def test_a_forward_pass_beside_it_keeps_the_barrier(order):
    """Layers that are written out."""
    assert _barriers(_written_out, order) == [True, True, True]


def test_a_checkpoint_that_another_recomputes_keeps_the_barrier():
    """Its forward pass is recomputed in the same iteration."""
    assert True in _barriers(_nested, "grad(amp(f))")


def test_an_iteration_with_a_forward_pass_keeps_the_barrier():
    """Gradients that are taken in the body of a loop."""
    assert _found(jaxamp.amp(_of_micro_batches, "bf16")) == [True, True, True]
