"""What is elementwise of logits is computed for each equation that reads it."""

import jax.numpy as jnp
import numpy as np

from jaxamp.found.cross_entropy.read_anew import read_anew
from tests.scopes import equations_of


def _sums(x, w):
    """Two readers of one exponential: a sum of words, and a sum of tokens."""
    likely = jnp.exp(x @ w)
    return likely.sum(-1), likely.sum(0)


def test_the_second_reader_has_a_copy_of_its_own():
    """Behind a barrier, or the compiler would join what is computed twice."""
    x, w = jnp.float32(np.random.default_rng(0).standard_normal((2, 16, 16)))
    counts = []
    for fn in (_sums, read_anew(_sums)):
        names = [eqn.primitive.name for eqn, _ in equations_of(fn, x, w)]
        counts.append([names.count(n) for n in ("dot_general", "exp", "read_anew")])
    assert counts == [[1, 1, 0], [1, 2, 1]]
    for got, want in zip(read_anew(_sums)(x, w), _sums(x, w), strict=True):
        np.testing.assert_array_equal(got, want)


def test_moved_logits_are_logits():
    """Transposed ones, as of a layer mapped over tokens, are read anew, by the first reader too.

    XLA would else store what the product makes, and what is transposed of it.
    """

    def transposed(x, w):
        likely = jnp.exp((w.T @ x.T).T)
        return likely.sum(-1), likely.sum(0)

    x, w = jnp.float32(np.random.default_rng(0).standard_normal((2, 16, 16)))
    names = [eqn.primitive.name for eqn, _ in equations_of(read_anew(transposed), x, w)]
    assert [names.count(n) for n in ("dot_general", "exp", "read_anew")] == [1, 2, 2]
    for got, want in zip(read_anew(transposed)(x, w), transposed(x, w), strict=True):
        np.testing.assert_array_equal(got, want)


def test_logits_have_two_axes_where_examples_are_apart():
    """Those of XLA's products, so that it may write cotangents over logits."""
    x, w = jnp.float32(np.random.default_rng(0).standard_normal((2, 16, 16)))
    x = x.reshape(4, 4, 16)
    shapes = [
        eqn.outvars[0].aval.shape
        for eqn, _ in equations_of(read_anew(_sums, in_rows=True), x, w)
        if eqn.primitive.name == "exp"
    ]
    assert shapes == [(16, 16), (16, 16)]
    for got, want in zip(read_anew(_sums, in_rows=True)(x, w), _sums(x, w), strict=True):
        np.testing.assert_array_equal(got, want)
