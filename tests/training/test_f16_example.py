"""The example of float16 training shows what it says it shows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from examples import f16_loss_scaling
from examples.char_transformer import Corpus, Transformer

pytestmark = pytest.mark.long


def test_digits_in_f16_need_loss_scaling(tmp_path):
    """Without a scale nothing is learnt; with one the losses are those of float32."""
    picture = tmp_path / "curves.png"
    options = ["--task", "digits", "--seeds", "1", "--steps", "250", "--picture", str(picture)]
    (results,) = f16_loss_scaling.main(options).values()
    f32, bf16, f16, scaled = results.values()
    last = {
        "f32": f32.losses[:, -20:].mean(),
        "bf16": bf16.losses[:, -20:].mean(),
        "f16": f16.losses[:, -20:].mean(),
        "scaled": scaled.losses[:, -20:].mean(),
    }
    assert last["f16"] > 2.29  # ln 10, what guessing gives
    assert last["f32"] < 1.3
    np.testing.assert_allclose(last["scaled"], last["f32"], rtol=0.05)
    np.testing.assert_allclose(last["bf16"], last["f32"], rtol=0.1)
    assert f16.accuracy.max() < 0.15
    np.testing.assert_allclose(scaled.accuracy, f32.accuracy, atol=0.05)
    assert scaled.accuracy.min() > 0.3
    assert f16.zeros[:, -1].min() > 0.5
    assert scaled.zeros.max() < 0.05
    assert scaled.scales[0, -1] == 4 * scaled.scales[0, 0]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_characters_in_f16_need_loss_scaling():
    """Without a scale many gradients are zero and the loss hardly falls; with one it does."""

    def small(key):
        return Transformer(len(Corpus.load().alphabet), width=16, heads=2, depth=1, key=key)

    task = dataclasses.replace(f16_loss_scaling.characters(), init=small)
    f16, scaled = (
        f16_loss_scaling.train(task, *f16_loss_scaling.RUNS[name], steps=50, seeds=1)
        for name in ("f16", "f16, loss scaling")
    )
    assert scaled.losses[:, -10:].mean() < 3.1 < 3.4 < f16.losses[:, -10:].mean()
    assert scaled.zeros.max() < 0.2 < 0.4 < f16.zeros[:, -1].min()
