"""The example that trains the character transformer with quantized dots."""

import equinox as eqx
import jax
import numpy as np
import pytest

from examples import char_transformer, fp8_char_transformer
from jaxamp import amp
from tests.quantized.lowp.models import sqnr

pytestmark = pytest.mark.long


@pytest.mark.minutes
def test_the_example_trains_under_every_recipe(tmp_path):
    """Three steps of a tiny network: losses beside bf16's, gradients too, and a picture."""
    picture = tmp_path / "curves.png"
    base, *others = fp8_char_transformer.main(["--quick", "--picture", str(picture)])
    assert [run.name for run in others] == ["fp8_current", "fp8_block", "mxfp8"]
    for run in others:
        assert run.final == pytest.approx(base.final, rel=0.02)
        assert 14 < run.worst < 60
        assert (run.losses != base.losses).any()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def logits(policy, corpus, size):
    """What the network says of its first batch."""
    (batch,) = corpus.batches(1, size.batch, size.length, fp8_char_transformer.SEED)
    model = fp8_char_transformer.network(corpus, size)
    return eqx.filter_jit(amp(lambda m, b: jax.vmap(m)(b[:, :-1]), policy))(
        model, np.asarray(batch)
    )


@pytest.mark.minutes
def test_output_and_every_gradient_at_full_size():
    """The network of the page, before its first step, against bf16."""
    corpus, size = char_transformer.Corpus.load(), char_transformer.Size(steps=1)
    base, *recipes = fp8_char_transformer.POLICIES.values()
    output = logits(base, corpus, size)
    gradients = fp8_char_transformer.gradients(base, corpus, size)
    for policy in recipes:
        assert sqnr(output, logits(policy, corpus, size)) > 20
        got = fp8_char_transformer.gradients(policy, corpus, size)
        assert len(got) == len(gradients) > 10
        assert min(map(sqnr, gradients, got)) > 20
