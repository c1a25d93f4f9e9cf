"""What sums of few values are: masks that any format holds, and arrays of an activation's size."""

import jax
import jax.numpy as jnp
import pytest

from jaxamp import OpKind, Precision, amp, plan_of

TOKENS, WIDTH, EXPERTS, PLACES = 24, 16, 4, 8
KEYS = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(KEYS[0], (TOKENS, WIDTH))
ROUTER = jax.random.normal(KEYS[1], (WIDTH, EXPERTS))
W = jax.random.normal(KEYS[2], (EXPERTS, WIDTH, WIDTH)) / WIDTH**0.5
IMAGES = jax.random.normal(KEYS[3], (2, 8, 8, WIDTH))


def experts(x: jax.Array, chosen: int = 2) -> jax.Array:
    """Each token goes to some experts, by a product with a mask (Lepikhin et al. 2020)."""
    gates, indices = jax.lax.top_k(jax.nn.softmax(x @ ROUTER), chosen)
    to_expert = jax.nn.one_hot(indices, EXPERTS)
    taken = jnp.cumsum(to_expert.reshape(-1, EXPERTS), 0).reshape(to_expert.shape)
    place = jnp.sum(taken * to_expert, -1).astype(int) - 1
    mask = to_expert[..., None] * jax.nn.one_hot(place, PLACES)[..., None, :]
    dispatch, combine = mask.sum(1), (mask * gates[..., None, None]).sum(1)
    hidden = jnp.einsum("tep,tw->epw", dispatch, x @ W[0])
    return jnp.einsum("tep,epw->tw", combine, jnp.einsum("epw,ewv->epv", hidden, W))


def products(fn, *args):
    """Precisions in which the products of a program read their first operands."""
    decisions = plan_of(fn, "auto_mixed_bf16")(*args).decisions()
    return [d.operands[0] for d in decisions if d.kind is OpKind.COMPUTE]


def test_a_mask_that_sends_tokens_to_experts_is_multiplied_narrow() -> None:
    """A sum of two numbers that are zero or one is at most two."""
    assert set(products(experts, X)) == {Precision.BF16}
    exact, found = experts(X), amp(experts)(X)
    assert jnp.linalg.norm(found - exact) < 0.02 * jnp.linalg.norm(exact)


@pytest.mark.parametrize(("many", "precision"), [(256, Precision.BF16), (257, Precision.F32)])
def test_counts_are_multiplied_narrow_while_they_are_exact(many: int, precision: Precision) -> None:
    words = jnp.zeros((TOKENS, many), int)

    def bag(words: jax.Array, table: jax.Array) -> jax.Array:
        return jax.nn.one_hot(words, WIDTH).sum(1) @ table

    assert products(bag, words, W[0]) == [precision]


def pooled(images: jax.Array, by: int) -> jax.Array:
    hidden = jnp.tanh(images @ W[0])
    size = hidden.shape[1] // by
    squares = hidden.reshape(2, size, by, size, by, WIDTH)
    return squares.sum((2, 4)) @ W[1]


@pytest.mark.parametrize(("by", "stored"), [(2, Precision.BF16), (4, Precision.F32)])
def test_what_is_pooled_of_few_is_an_activation(by: int, stored: Precision) -> None:
    """A quarter of an activation is no statistic."""
    decisions = plan_of(pooled, "auto_mixed_bf16")(IMAGES, by).decisions()
    (sums,) = [d for d in decisions if d.kind is OpKind.REDUCTION]
    assert sums.output is stored
    assert sums.accumulation is Precision.F32


def test_what_is_folded_over_a_small_batch_is_no_activation() -> None:
    """Or the plan of a program would depend on how many rows it gets."""

    def centred(rows: jax.Array) -> jax.Array:
        hidden = rows @ W[0]
        return (hidden - hidden.sum(0)) @ W[1]

    few, many = (
        [d.output for d in plan_of(centred, "auto_mixed_bf16")(X[:rows]).decisions()]
        for rows in (3, TOKENS)
    )
    assert few == many
