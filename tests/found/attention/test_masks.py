"""Masks that are known numbers go to kernels as words, whatever they are written with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxamp
from tests.found.attention import spellings  # noqa: F401
from tests.found.attention.corpus import SPELLINGS, B, H, N, gradient, pv, qk
from tests.found.attention.finding import FUSED, JOINT, ORDERS, kind
from tests.scopes import equations_of

KINDS = {
    "segments_of_numbers": "intervals",
    "segments_in_blocks": "intervals",
    "segments_by_kronecker": "intervals",
    "segments_mixed": "segments",
    "segments_with_windows": "intervals",
    "segments_of_fewer_keys": "intervals",
    "segments_of_layers": "intervals",
    "segments_with_bias": "intervals",
    "prefix_and_causal": "intervals",
    "causal_at_the_end": "intervals",
    "window_to_both_sides": "intervals",
    "window_of_two_triangles": "window",
    "segments_with_padding": "bias",  # rows that see nothing are the program's own
    "segments": "bias",  # an argument
}


@pytest.mark.product("name", every=2)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", KINDS)
def test_the_kind_of_a_mask(name, order):
    """Kernels are told of it, and no bias is read but those of the program."""
    fn, args = SPELLINGS[name].built
    if order == JOINT:
        fn, args = gradient(fn, args)
    plan = jaxamp.plan_of(fn, FUSED)(*args)
    assert {a.backward for a in plan.found} == {order == JOINT}
    specs = _kernels(fn, *args)
    is_biased = KINDS[name] == "bias" or name == "segments_with_bias"
    assert {kind(spec) for spec, _ in specs} == {KINDS[name].replace("bias", "none")}
    assert all((bias is not None) == is_biased for _, bias in specs)


def _kernels(fn, *args):
    """The specification of each forward pass under `amp`, and the type of its bias."""
    equations = [eqn for eqn, _ in equations_of(jaxamp.amp(fn, FUSED), *args)]
    found = [eqn for eqn in equations if eqn.primitive.name == "attention_forward"]
    return [(eqn.params["spec"], eqn.invars[3] if len(eqn.invars) > 3 else None) for eqn in found]


def _masks():
    """Masks of random segments, causal and with windows or not, and of random rows."""
    draw = np.random.default_rng(0)
    for count in range(1, 5):
        for words in (6, 8, 10):
            number = draw.integers(0, count, words)
            number = np.sort(number) if words == 8 else number
            past = np.arange(words)[:, None] - np.arange(words)
            seen = number[:, None] == number
            yield seen
            yield seen & (past >= 0)
            yield seen & (past >= 0) & (past < draw.integers(1, words))
            yield draw.random((words, words + 2 * count)) < 0.7
            yield draw.integers(0, words, (words, 1)) <= np.arange(words + 2 * count)


def test_words_say_what_a_mask_does():
    """The mask of a specification is the program's, or it is a bias."""
    kinds = set()
    for seen in _masks():

        def attend(q, k, v, seen=seen):
            return pv(jax.nn.softmax(jnp.where(seen, qk(q, k), -1e9)), v)

        q, k = (jax.ShapeDtypeStruct((B, n, N, H), jnp.float32) for n in seen.shape)
        ((spec, bias),) = _kernels(attend, q, k, k)
        kinds.add("bias" if bias is not None else kind(spec))
        if bias is None:
            words = spec.seen(*seen.shape)
            np.testing.assert_array_equal(True if words is None else words, seen)
    assert kinds == {"none", "causal", "window", "segments", "intervals", "bias"}


def test_numbers_of_long_masks_are_few():
    """A program holds some for each word, not for each pair."""

    def attend(q, k, v):
        number = jnp.arange(4096) // 1000
        return jax.nn.dot_product_attention(q, k, v, mask=number[:, None] == number)

    x = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32)
    ((spec, bias),) = _kernels(attend, x, x, x)
    assert bias is None
    assert sum(x.nbytes for x in (spec.mask.start, spec.mask.stop)) == 2 * 4 * 4096
    text = jax.jit(jaxamp.amp(attend, FUSED)).lower(x, x, x).as_text()
    assert len(text) < 100_000  # with its constants
