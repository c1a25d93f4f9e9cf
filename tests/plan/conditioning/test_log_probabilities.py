"""Logarithms of probabilities, which are differences of logits and a logarithm of their sum."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from jaxamp import amp
from tests.numerics.oracle import products_rounded
from tests.programs.registry import Draw

DRAW = Draw("distillation")
X, W = DRAW.normal(64, 16), DRAW.weight(16, 40)
TEACHER = W + DRAW.normal(16, 40, scale=0.02)


def test_a_mixture_of_two_models_is_not_stored_rounded() -> None:
    """A student is near its teacher: what their divergence is of is smaller than a rounding."""

    def divergence(w: jax.Array, x: jax.Array) -> jax.Array:
        student, teacher = jax.nn.log_softmax(x @ w), jax.nn.log_softmax(x @ TEACHER)
        mixture = logsumexp(jnp.stack([student, teacher]), axis=0) - np.log(2)
        terms = [jnp.exp(p) * (p - mixture) for p in (student, teacher)]
        return jnp.stack(terms).sum() / len(x)

    fn = jax.value_and_grad(divergence)
    found, exact = (jax.jit(f)(W, X) for f in (amp(fn, "mixed_bf16"), fn))
    rounded = jax.jit(products_rounded(fn, jnp.bfloat16))(W, X)
    for made, by_hand, true in zip(found, rounded, exact, strict=True):
        assert np.linalg.norm(made - true) <= 4 * np.linalg.norm(by_hand - true)
