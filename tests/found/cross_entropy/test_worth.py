"""How many chunks pay for a head."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jaxamp
from jaxamp.compiled.deviceless import compile_all, exported
from jaxamp.compiled.targets import TARGETS
from jaxamp.found.cross_entropy.losses import chunk_losses
from jaxamp.found.cross_entropy.worth import Sizes, chunks_for
from jaxamp.kernels.target_gpu import lowering_for, on_chip_memory
from tests.calls import entered
from tests.found.cross_entropy.finding import CHUNKED

HEAD = Sizes(tokens=16384, width=4096, words=65536, again=1)
AGES = 1e9
"""What takes so long that no head counts."""


def _more(head, chunks):
    """The seconds that chunks add."""
    return head.time(chunks) - head.time(1)


def _least(chunks):
    """The seconds of products of a program of which so many chunks add just what they may."""
    alone = _more(HEAD, chunks) / (HEAD.slower(chunks, 0) - 1)
    return _more(HEAD, chunks) / 0.03 - alone


@pytest.mark.parametrize("chunks", [8, 4, 2])
def test_half_as_many_chunks_are_tried_where_more_take_too_much(chunks):
    """A program in which one so large takes just as much as it may gets no more than it allows."""
    ample, short = (_least(chunks) * share for share in (1.0001, 0.9999))
    assert chunks_for(HEAD, None, ample) == chunks
    fewer = chunks_for(HEAD, None, short)
    assert fewer == chunks // 2 if chunks > 2 else "take 1.03 times as" in fewer


def test_who_asks_for_memory_waits():
    assert chunks_for(HEAD, "memory", 1e-9) == 2 * chunks_for(HEAD, None, AGES)


def test_chunks_are_short_where_they_take_less_time():
    """As those of capped logits, which XLA:GPU stores in float32."""
    head = Sizes(tokens=4096, width=1024, words=151936)
    assert [chunks_for(head._replace(caps=caps), None, AGES) for caps in (0, 1)] == [2, 4]


def test_a_matrix_without_a_gradient_is_not_added_to():
    """So more chunks cost less."""
    head = Sizes(tokens=4096, width=1024, words=151936)
    assert _more(head, 2) > 1.5 * _more(head._replace(is_trained=False), 2)


def test_words_that_are_padded_cost_more():
    """XLA:GPU copies what it splits, products with few results of words that 16 does not divide."""
    even, odd = (Sizes(tokens=8192, width=768, words=words) for words in (30528, 30520))
    assert _more(even, 2) == pytest.approx(_more(odd, 2), rel=1e-2)
    assert 1.5 * _more(even, 4) < _more(odd, 4)


def test_capped_logits_cost_more_where_they_are_stored():
    """XLA:GPU stores a `tanh` of logits in float32: chunks take less time. No TPU does."""

    def loss(cap, x, w):
        logits = cap(x @ w)
        return (jax.nn.logsumexp(logits, -1) - logits[:, 0]).mean()

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32768, 256), (256, 65536))]
    policy = jaxamp.PrecisionPolicy.MIXED_BF16.replace(loss_in_chunks=True)

    def slower(cap):
        return jaxamp.plan_of(partial(loss, cap), policy)(*args).found[0].slower

    with lowering_for("TPU v5 lite"):
        assert slower(jnp.tanh) == slower(jnp.negative) > 1
    assert slower(jnp.tanh) < 0.95 < 1 < slower(jnp.negative)


@pytest.mark.parametrize(
    ("chip", "words", "chunks"),
    [
        ("v5e", 50265, 8),
        ("v5e", 57344, 8),
        ("v5e", 60000, 4),
        ("v5p", 50265, 4),
        ("h200", 50265, 2),
    ],
)
def test_logits_that_stay_on_a_chip_are_not_moved(chip, words, chunks):
    """Chunks of 1,024 tokens are those of a TPU that keeps so many words of each in VMEM."""
    with TARGETS[chip].described():
        head = Sizes(tokens=8192, width=768, words=words, on_chip=on_chip_memory())
    assert chunks_for(head, None, 15e-3) == chunks


def test_matrices_are_read_and_added_to_in_each_chunk():
    """More of them cost a TPU more, though its logits are never moved."""
    head = Sizes(tokens=8192, width=768, words=32128, on_chip=2**30)
    assert head.time(8) < head.time(16) < head.time(32)


def test_a_tpu_that_is_not_known_keeps_the_least():
    with TARGETS["7x"].described():
        least = on_chip_memory()
    with lowering_for("TPU v99"):
        assert on_chip_memory() == least > 0


@pytest.mark.deviceless("v5e")
@pytest.mark.parametrize(("words", "stays"), [(57344, True), (60000, False)])
def test_a_v5e_keeps_what_is_said(words, stays):
    """Of 1,024 tokens, the logits stay in VMEM or are in the memory of the compiled program."""
    chip = TARGETS["v5e"]
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8192, 768), (768, words)))

    def loss(x, w):
        logits = x @ w
        return (jax.nn.logsumexp(logits, -1) - logits[:, 0]).mean()

    policy = jaxamp.PrecisionPolicy.MIXED_BF16.replace(loss_in_chunks="memory")
    with chip.described():
        assert (1024 * 2 * words <= on_chip_memory()) == stays
        step = jax.grad(jaxamp.amp(loss, policy), (0, 1))
        program = exported(step, lambda fn: fn, (x, w), {}, chip.platform)
    ((module, _),) = compile_all(chip, [program])
    lines = (line for part in module.computations.values() for line in part.instructions)
    logits = [a for line in lines for a in line.results if a.dims == (1024, words)]
    assert any(a.on_chip for a in logits) == stays


def _deep(weights, x):
    """A loss after layers that gelu makes look like logits to who does not follow them."""
    for w in weights:
        x = x + jax.nn.gelu(x @ w)
    return jax.nn.logsumexp(x @ jnp.tile(weights[0], 4), -1).mean()


def _of_many_heads(weights, x):
    return sum(jax.nn.logsumexp(x @ jnp.tile(w, 4), -1).mean() for w in weights)


@pytest.mark.parametrize("loss", [_deep, _of_many_heads])
def test_four_times_as_much_is_searched_in_four_times_as_many_calls(loss):
    """Of layers before a loss, each in as many calls as one of few, and of losses."""

    def calls(count):
        args = [jnp.ones((64, 64))] * count, jnp.ones((8, 64))
        closed = jax.make_jaxpr(jax.value_and_grad(loss))(*args)
        return entered(lambda: chunk_losses(closed, CHUNKED)) / count

    calls(6)  # what is imported and looked up once
    assert calls(24) < 1.1 * calls(6)
