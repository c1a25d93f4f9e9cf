"""What sums of few values are: counts and masks that any format holds, and statistics."""

import jax
import jax.numpy as jnp
import pytest

from jaxamp import OpKind, Precision, amp, plan_of
from tests.programs.registry import Draw

TOKENS, WIDTH, EXPERTS, PLACES = 24, 16, 4, 8
DRAW = Draw("counts")
X = DRAW.normal(TOKENS, WIDTH)
ROUTER = DRAW.normal(WIDTH, EXPERTS)
W = DRAW.normal(EXPERTS, WIDTH, WIDTH, scale=WIDTH**-0.5)


def experts(x: jax.Array, chosen: int = 2) -> jax.Array:
    """Each token goes to some experts, by a product with a mask (Lepikhin et al. 2020)."""
    gates, indices = jax.lax.top_k(jax.nn.softmax(x @ ROUTER), chosen)
    gates = gates / gates.sum(-1, keepdims=True)
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


@pytest.mark.parametrize(
    ("many", "power", "precision"),
    [(16, 2, Precision.BF16), (18, 2, Precision.F32), (18, -2, Precision.BF16)],
)
def test_powers_of_indices_are_whole_numbers(many: int, power: int, precision: Precision) -> None:
    """As in a variance of places: 17² has nine bits, and 1/17² is a fraction."""
    fn = lambda p: p @ (jnp.arange(float(many)) + (power < 0)) ** power  # noqa: E731
    assert products(fn, jnp.ones((8, many))) == [precision]


def test_a_sum_of_two_gates_is_a_statistic() -> None:
    """Rounded, it changes which experts are chosen, and cotangents that nearly cancel."""
    decisions = plan_of(jax.grad(lambda x: jnp.mean(experts(x) ** 2)), "auto_mixed_bf16")(X)
    sums = [d.output for d in decisions.decisions() if d.eqn.primitive.name == "reduce_sum"]
    assert sums.count(Precision.F32) > 5
    assert set(sums) <= {Precision.F32, None}
