"""Taylor mode around amp, beside that of float32."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet

from jaxamp import PrecisionPolicy, amp
from tests.programs.registry import Draw

WIDTH = 32
DRAW = Draw("jet")
X, W = DRAW.weight(WIDTH, WIDTH), DRAW.weight(WIDTH, WIDTH)
BIAS, LABELS = DRAW.normal(WIDTH), np.arange(WIDTH)[:, None]
SERIES = [DRAW.normal(WIDTH, WIDTH), X]

POLICIES = {
    "auto_mixed_bf16": 0.02,
    "auto_mixed": 0.005,
    "fp8_current": 0.15,  # three bits of mantissa in each of two products
}
PROGRAMS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "layers": lambda w, x: jnp.tanh(jnp.tanh(x @ w + BIAS) @ w),
    "residual": lambda w, x: jnp.sin(x @ w + BIAS) @ w + x,
    "softmax": lambda w, x: jax.nn.softmax(jnp.sin(x) @ w) @ w,
    "labels": lambda w, x: jnp.take_along_axis(jax.nn.log_softmax(jnp.sin(x) @ w), LABELS, 1),
}


@pytest.mark.product("program")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_terms_of_higher_order(program: str, policy: str) -> None:
    fn, parsed = PROGRAMS[program], PrecisionPolicy.parse(policy)
    parsed = parsed.replace(scaling={"small": ()}) if parsed.is_scaled else parsed

    def terms(fn: Callable[[jax.Array, jax.Array], jax.Array]) -> list[jax.Array]:
        zero = jnp.zeros_like(W)
        out, series = jax.jit(lambda w, x: jet(fn, (w, x), ([zero, zero], SERIES)))(W, X)
        return [out, *series]

    for found, exact in zip(terms(amp(fn, parsed)), terms(fn), strict=True):
        assert found.dtype == exact.dtype
        assert np.linalg.norm(found - exact) <= POLICIES[policy] * np.linalg.norm(exact)


def test_gradients_of_terms() -> None:
    def curvature(fn: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        loss = lambda w: jnp.mean(jet(lambda x: fn(w, x), (X,), (SERIES,))[1][1] ** 2)  # noqa: E731
        return jax.jit(jax.grad(loss))(W)

    found, exact = curvature(amp(PROGRAMS["layers"])), curvature(PROGRAMS["layers"])
    assert found.dtype == jnp.float32
    assert np.linalg.norm(found - exact) <= 0.05 * np.linalg.norm(exact)
