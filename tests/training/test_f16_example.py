"""The example of float16 training shows what it says it shows."""

from __future__ import annotations

import numpy as np
import pytest

from examples import f16_loss_scaling


@pytest.mark.slow
def test_digits_in_f16_need_loss_scaling(tmp_path):
    """Without a scale nothing is learnt; with one the losses are those of float32."""
    picture = tmp_path / "curves.png"
    options = ["--task", "digits", "--seeds", "1", "--steps", "250", "--picture", str(picture)]
    (results,) = f16_loss_scaling.main(options).values()
    f32, f16, scaled = results.values()
    last = [result.losses[:, -20:].mean() for result in (f32, f16, scaled)]
    assert last[1] > 2.29  # ln 10, what guessing gives
    assert last[0] < 1.3
    np.testing.assert_allclose(last[2], last[0], rtol=0.05)
    assert f16.accuracy.max() < 0.15
    np.testing.assert_allclose(scaled.accuracy, f32.accuracy, atol=0.05)
    assert scaled.accuracy.min() > 0.3
    assert f16.zeros[:, -1].min() > 0.5
    assert scaled.zeros.max() < 0.05
    assert scaled.scales[0, -1] == 4 * scaled.scales[0, 0]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_characters_in_f16_need_loss_scaling(tmp_path):
    """Most gradients are zero without a scale, and the loss does not fall; with one it is f32's."""
    picture = ["--picture", str(tmp_path / "curves.png")]
    options = ["--task", "characters", "--seeds", "1", "--steps", "60", *picture]
    (results,) = f16_loss_scaling.main(options).values()
    f32, f16, scaled = results.values()
    last = [result.losses[:, -10:].mean() for result in (f32, f16, scaled)]
    assert last[0] < 2.9 < 3.4 < last[1]
    np.testing.assert_allclose(last[2], last[0], rtol=0.02)
    assert f16.zeros[:, -1].min() > 0.5
    assert scaled.zeros.max() < 0.1
