"""The examples run, and show what they say they show."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

from examples import char_transformer, side_by_side

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def digits():
    """The program, imported where it is run: scikit-learn takes seconds."""
    return importlib.import_module("examples.digits")


@pytest.fixture(scope="module")
def digit_runs(digits, tmp_path_factory):
    """One epoch of the digits under every policy, and the picture that it drew."""
    picture = tmp_path_factory.mktemp("digits") / "loss.png"
    return digits.main(["--quick", "--picture", str(picture)]), picture


@pytest.mark.long
def test_digits_losses_stay_close_to_f32(digit_runs):
    """Same weights, same batches: only roundings lie between the curves."""
    (f32, *mixed), _ = digit_runs
    assert len(f32.losses) == 22
    for run in mixed:
        difference = np.abs(run.losses - f32.losses)
        assert 0 < difference.max() < 0.05, run.policy


@pytest.mark.long
def test_the_demo_fits_one_screen_and_ends_with_what_to_do(digits, tmp_path, capsys):
    """Its last ones are commands that a reader can type."""
    digits.main(["--quick", "--picture", str(tmp_path / "loss.png")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 30
    assert "Next" in "".join(lines[-8:])
    assert "jaxamp report" in "".join(lines[-8:])


@pytest.mark.long
@pytest.mark.parametrize(("index", "low"), [(1, "bf16"), (2, "f16")])
def test_digits_plans_lower_the_matrix_products(digit_runs, index, low):
    """Every matrix product of the train step runs in the policy's own precision."""
    assert set(digit_runs[0][index].report.dots()) == {low}


@pytest.mark.long
def test_digits_plan_in_f32_lowers_nothing(digit_runs):
    """The run that the others are compared with is float32 throughout."""
    f32 = digit_runs[0][0].report
    assert set(f32.dots()) == {"f32"}
    assert f32.total.bytes_narrow == 0


@pytest.mark.long
def test_digits_draws_the_loss_curves(digit_runs):
    """The picture is a PNG that holds more than an empty frame."""
    _, picture = digit_runs
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000


def test_digits_batches_are_the_same_for_every_policy(digits):
    """Two calls with one seed give the same pictures in the same order."""
    data = digits.Digits.load(seed=0)
    first, second = (list(data.batches(epochs=2, seed=3)) for _ in range(2))
    assert len(first) == data.steps(epochs=2)
    np.testing.assert_array_equal([y for _, y in first], [y for _, y in second])


@pytest.mark.long
@pytest.mark.parametrize("name", ["recipe_char", "recipe_vit", "recipe_lora"])
def test_recipes_learn_alike_in_both_precisions(name, tmp_path, capsys):
    """Losses fall, stay together, and are drawn; the report says that all products are narrow."""
    recipe = importlib.import_module(f"examples.{name}").RECIPE
    losses = side_by_side.compare(recipe, 60, tmp_path / "losses.png")
    wide, narrow = losses.values()
    assert narrow[-5:].mean() < 0.95 * narrow[0]
    assert abs(wide - narrow).max() < 0.1 * wide[0]
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert "100 % of the FLOPs of matrix products in bf16" in capsys.readouterr().out


@pytest.mark.long
def test_the_notebook_runs():
    """Its cells, one after the other."""
    cells = json.loads((ROOT / "examples/tour.ipynb").read_text())["cells"]
    names = {"__name__": "tour"}
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 4
    for text in code:
        exec(compile(text, "tour.ipynb", "exec"), names)
    assert names["loss"] < names["first"]


@pytest.mark.long
@pytest.mark.minutes
def test_char_transformer_trains_and_writes():
    """A scanned, rematerialised network trains in both precisions and writes from its alphabet."""
    f32, bf16 = char_transformer.main(["--quick"])
    assert f32.losses[-1] < f32.losses[0]
    assert 0 < np.abs(bf16.losses - f32.losses).max() < 0.05
    alphabet = set(char_transformer.Corpus.load().alphabet)
    for run in (f32, bf16):
        assert len(run.text) == char_transformer.QUICK.sample
        assert set(run.text) <= alphabet


def test_corpus_codes_spell_the_text():
    """Encoding loses nothing: the codes read back as Python's help on `assert`."""
    corpus = char_transformer.Corpus.load()
    assert corpus.decode(corpus.codes[:22]) == 'The "assert" statement'
