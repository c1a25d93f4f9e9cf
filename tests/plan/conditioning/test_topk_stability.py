"""What is chosen by an order: a router's experts, where its probabilities are nearly even."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxamp import amp, plan_of
from jaxamp.core.formats import is_narrow
from tests.numerics.oracle import products_rounded
from tests.programs.registry import Draw

TOKENS, WIDTH, EXPERTS, CHOSEN = 512, 32, 64, 4
DRAW = Draw("topk stability")
X = DRAW.normal(TOKENS, WIDTH)
ROUTER = DRAW.normal(WIDTH, EXPERTS, scale=0.05 / WIDTH**0.5)  # as it is initialized
W = DRAW.normal(EXPERTS, WIDTH)
ALLOWED = {"auto_mixed_bf16": 0.05, "auto_mixed": 0.01}  # for the rounding of the logits themselves
LOW = {"auto_mixed_bf16": jnp.bfloat16, "auto_mixed": jnp.float16}


def plain(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _routed(jax.nn.softmax(x @ ROUTER))


def balanced(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A mean of the probabilities is fused with them."""
    probabilities = jax.nn.softmax(x @ ROUTER)
    return *_routed(probabilities), probabilities.mean(0)


def _routed(probabilities: jax.Array) -> tuple[jax.Array, jax.Array]:
    gates, experts = lax.top_k(probabilities, CHOSEN)
    return (jax.nn.one_hot(experts, EXPERTS) * gates[..., None]).sum(1) @ W, experts


def in_blocks(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mixed, experts = lax.map(plain, x.reshape(4, -1, WIDTH))
    return mixed, experts.reshape(TOKENS, CHOSEN)


@pytest.mark.parametrize(
    ("router", "policy"),
    [(plain, "auto_mixed_bf16"), (balanced, "auto_mixed_bf16"), (in_blocks, "auto_mixed")],
)
def test_a_token_goes_to_the_experts_of_its_own_logits(router, policy: str) -> None:
    """In a narrow format many of the largest probabilities are equal, and the first ones win."""

    def experts(fn) -> np.ndarray:
        return np.sort(fn(X)[1], -1)

    wanted = experts(products_rounded(router, LOW[policy]))
    differ = (experts(jax.jit(amp(router, policy))) != wanted).any(-1)
    assert differ.mean() < ALLOWED[policy]


def test_logits_that_are_few_beside_what_experts_compute_are_not_rounded() -> None:
    """Then no token changes its experts for it, and float32 logits take next to no memory."""
    wide = DRAW.normal(EXPERTS, 32 * EXPERTS)

    def router(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        gates, experts = lax.top_k(jax.nn.softmax(x @ ROUTER), CHOSEN)
        return (jax.nn.one_hot(experts, EXPERTS) * gates[..., None]).sum(1) @ wide, experts

    wanted = products_rounded(router, jnp.bfloat16)(X)[1]
    assert (jax.jit(amp(router, "bf16"))(X)[1] == wanted).all()


def test_the_largest_alone_are_picked_from_what_is_stored() -> None:
    """Rounded after they are picked they are the same."""

    def largest(x: jax.Array) -> jax.Array:
        return lax.top_k(jnp.tanh(x @ W.T), CHOSEN)[0] @ W[:CHOSEN]

    (curve,) = [d for d in plan_of(largest)(X).decisions() if d.primitive == "tanh"]
    assert is_narrow(curve.output)
