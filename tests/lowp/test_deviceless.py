"""What the compilers for absent chips make of scaled dots; run by `make deviceless`."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from benchmarks.deviceless.models import transformer
from jaxamp import PrecisionPolicy, amp, plan_of, verify_lowering

pytestmark = pytest.mark.deviceless

CONFIG = transformer.Config(layers=4, width=4096, heads=32, length=2048, batch=4, vocabulary=32000)
PARAMS = jax.eval_shape(partial(transformer.unrolled, CONFIG), jax.random.key(0))
TOKENS = jax.ShapeDtypeStruct((CONFIG.batch, CONFIG.length + 1), jnp.int32)


def loss(params, tokens):
    return transformer.loss(CONFIG, False, params, tokens)[0]


@pytest.mark.parametrize("order", ["grad(amp)", "amp(grad)"])
def test_every_scaled_dot_of_a_transformer_is_an_fp8_product(order):
    """Four products a layer, and two in the backward pass for each of them."""
    if order == "amp(grad)":
        fn = amp(jax.grad(loss), "fp8_current")
        plan = plan_of(jax.grad(loss), "fp8_current")(PARAMS, TOKENS)
        planned = sum(d.scaled is not None for d in plan.decisions())
    else:
        fn = jax.grad(amp(loss, "fp8_current"))
        plan = plan_of(loss, "fp8_current")(PARAMS, TOKENS)
        planned = 3 * sum(d.scaled is not None for d in plan.decisions())
    got = verify_lowering(fn, target="h200")(PARAMS, TOKENS)
    assert (got.found, got.claimed, planned) == (48, 48, 48)
    assert got.complete
    assert not got.missing


def test_what_did_not_become_an_fp8_product_is_named():
    """An A100 has no products of 8 bits: the report says which dots run in 16."""
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    with_name = jax.named_scope("dense")(jnp.dot)
    got = verify_lowering(with_name, "fp8_current", "a100")(x, x)
    assert (got.claimed, got.found) == (1, 0)
    assert len(got.missing) == 1
    assert "dense" in got.missing[0]


def test_the_kernel_for_blocks_is_found():
    """On a TPU the kernel's products are counted, in both passes."""
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    policy = PrecisionPolicy.FP8_BLOCK.replace(scaling={"kernel": {}})
    fn = jax.grad(lambda x, w: jnp.sum(jnp.tanh(amp(jnp.dot, policy)(x, w))), (0, 1))
    got = verify_lowering(fn, target="v6e")(x, x)
    assert (got.claimed, got.found) == (3, 3)
