"""Labels that are no words, and logits that are no numbers, mean what they do in the program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.found.attention.corpus import Program
from tests.found.cross_entropy.finding import ORDERS, agree, replaced

T, D, V = 12, 4, 64
LABELS = np.array([0, 1, V - 1, V, V + 7, -1, -V, -V - 1, 2**31 - 1, -(2**31), 5, 6], np.int32)


def _taken(mode):
    def loss(x, w, labels):
        logp = jax.nn.log_softmax(x @ w)
        return -jnp.take_along_axis(logp, labels[:, None], -1, mode=mode)[:, 0]

    return loss


def _indexed(x, w, labels):
    return -jax.nn.log_softmax(x @ w)[jnp.arange(T), labels]


def _filled(x, w, labels):
    return -jax.nn.log_softmax(x @ w).at[jnp.arange(T), labels].get(mode="fill", fill_value=3.0)


def _one_hot(x, w, labels):
    return optax.softmax_cross_entropy(x @ w, jax.nn.one_hot(labels, V))


def _optax(x, w, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)


WAYS = {
    "fill": _taken("fill"), "clip": _taken("clip"), "none": _taken(None), "indexed": _indexed,
    "filled": _filled, "one_hot": _one_hot, "optax": _optax,
}  # fmt: skip


def _operands(**unusual):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((T, D), np.float32), rng.standard_normal((D, V), np.float32)
    for row, number in enumerate(unusual.get("numbers", ())):
        x[2 * row + 1] = number
    return x, w, unusual.get("labels", LABELS)


@pytest.mark.product("way")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
def test_labels_out_of_range(way, order):
    """They are clipped, filled, counted from the end or without a cotangent, as they were."""
    agree(*replaced(Program(way, lambda: (WAYS[way], _operands()), 1), order))


@pytest.mark.product("way")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", ["optax", "fill", "one_hot"])
def test_logits_that_are_no_numbers(way, order):
    """Rows of infinities and NaN give what they gave, and spoil no other row."""
    operands = _operands(numbers=(np.inf, -np.inf, np.nan, 1e38), labels=LABELS % V)
    agree(*replaced(Program(way, lambda: (WAYS[way], operands), 1), order))


@pytest.mark.parametrize("order", ORDERS)
def test_words_without_probability(order):
    """Logits of minus infinity, which a mask of words makes, have no cotangent."""

    def loss(x, w, labels):
        logits = jnp.where(jnp.arange(V) % 3 == 0, -jnp.inf, x @ w)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    operands = _operands(labels=np.arange(T, dtype=np.int32))
    agree(*replaced(Program("masked", lambda: (loss, operands), 1), order))
