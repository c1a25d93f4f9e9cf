"""The example that trains the character transformer with quantized dots."""

import pytest

from examples import fp8_char_transformer


@pytest.mark.numerics
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
