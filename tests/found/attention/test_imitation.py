"""The kernels' arithmetic on a CPU: it is that of Pallas' kernels, and accurate enough."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxamp.found.attention.kernels.spec import AttentionSpec, Operands
from jaxamp.found.attention.kernels.splash import SPLASH
from tests.found.attention import imitation, oracle
from tests.found.attention.kernels.calls import attention

LONG = pytest.mark.long
CASES = {
    "splash, causal": (SPLASH, (128, 1, 1), {"causal": True}),
    "splash, window, grouped": (SPLASH, (640, 2, 1), {"causal": True, "window": 100}),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_pallas_kernels_compute(case):
    """Where the kernels for TPU run interpreted: much nearer to them than they are to float64."""
    kernel, (length, heads, key_heads), words = CASES[case]
    draw = np.random.default_rng(0)
    counts = (heads, key_heads, key_heads, heads)
    q, k, v, dout = (
        jnp.asarray(draw.standard_normal((1, length, n, 64)), jnp.bfloat16) for n in counts
    )
    spec = AttentionSpec(scale=0.125, **words)
    with pltpu.force_tpu_interpret_mode():
        run = jax.jit(functools.partial(kernel.run, spec=spec, bias_grad=False))
        want, sums = run(Operands(q, k, v))
        grads = run(Operands(q, k, v, None, want, sums, dout))[:3]
    out, lse = imitation.forward(q, k, v, None, spec=spec, rounds=False)
    found = imitation.backward(q, k, v, None, want, sums, dout, spec=spec, bias_grad=False)
    np.testing.assert_allclose(lse, sums, atol=1e-5)
    exact = oracle.attention(*(np.asarray(x, np.float64) for x in (q, k, v, dout)), spec=spec)
    for got, other, right in zip((out, *found), (want, *grads), exact[:4], strict=True):
        assert oracle.error(got, other) < 0.05 * oracle.error(other, right)


@functools.cache
def _logits(spread, length, dtype):
    draw = np.random.default_rng(0)
    q, k, v, dout = (draw.standard_normal((1, length, 2, 64)) for _ in range(4))
    return [jnp.asarray(x, dtype) for x in (spread * q, k, v, dout)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("spread", "length"),
    [
        (30, 256),
        *(pytest.param(s, n, marks=LONG) for s in (1, 5, 30) for n in (1024, 4096)),
    ],
)
def test_it_is_as_accurate_as_the_form_written_out(spread, length, dtype):
    """At most 1.5 times the error of hand-written 16 bits, for output and gradients."""
    q, k, v, dout = _logits(spread, length, dtype)
    spec = AttentionSpec(scale=0.125, causal=True)
    exact = oracle.attention(*(np.asarray(x, np.float64) for x in (q, k, v, dout)), spec=spec)

    def by_hand(q, k, v):
        scores = jnp.einsum("btnh,bsnh->bnts", q * jnp.asarray(spec.scale, q.dtype), k)
        scores = jnp.where(np.tri(length, dtype=bool), scores.astype(jnp.float32), -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores).astype(q.dtype), v)

    def errors(form):
        out, vjp = jax.jit(lambda *x: jax.vjp(form, *x))(q, k, v)
        return [oracle.error(x, y) for x, y in zip((out, *vjp(dout)), exact[:4], strict=True)]

    hand = errors(by_hand)
    with imitation.kernels():
        kernel = errors(lambda *x: attention(*x, None, spec))
    for name, mine, others in zip(("out", "dq", "dk", "dv"), kernel, hand, strict=True):
        assert mine <= 1.5 * others, (name, mine, others)
