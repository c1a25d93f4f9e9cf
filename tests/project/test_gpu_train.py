"""The training benchmark: its steps, and the sizes of its models. `--toy` runs it on a CPU."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import gpu_models, gpu_report, gpu_train
from tests import audit


@pytest.mark.parametrize("way", ["f32", "hand-bf16", "hand-fused", "amp-f16"])
def test_a_step_keeps_float32_and_multiplies_as_its_way_says(way):
    """Parameters and moments stay float32; products are float32, bf16 or f16."""
    size = gpu_train.TOYS["350m"]()
    step, begin = gpu_train.make_step(size, way)
    params, state = begin(jax.random.key(0))
    traced = step.trace(params, state, size.sample(jax.random.key(1)))
    kept = jax.tree.leaves((params, state))
    assert [leaf.dtype for leaf in jax.tree.leaves(traced.out_info)[:-1]] == [x.dtype for x in kept]
    formats = {"f32": jnp.float32, "amp-f16": jnp.float16}
    expected = formats.get(way, jnp.bfloat16)
    products = [p for p in audit.products(traced.jaxpr.jaxpr) if p.is_float]
    low = [p for p in products if set(p.operands) == {jnp.dtype(expected)}]
    assert len(low) >= 0.8 * len(products) > 0


def test_sizes_are_those_of_their_names():
    """Parameters of the full models, counted from shapes alone."""
    sizes = {"350m": 355, "1.3b": 1312, "resnet50": 25.6, "vit-b": 86.4, "bert-512": 109}
    for name, millions in sizes.items():
        shapes = jax.eval_shape(gpu_train.MODELS[name]().init, jax.random.key(0))
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
        assert math.isclose(count / 1e6, millions, rel_tol=0.2), (name, count)


def test_language_models_read_real_text():
    """Passages of a standard library's sources: most bytes are letters, blanks and line ends."""
    tokens = gpu_train.TOYS["350m"]().sample(jax.random.key(0))
    words = bytes(tokens.reshape(-1).tolist()).decode("ascii")
    assert sum(c.isalpha() or c.isspace() for c in words) > 0.5 * len(words)
    assert len(set(words)) > 20


def test_delayed_scaling_keeps_its_history_in_the_state():
    """A step returns what it takes, the history included."""
    size = gpu_train.TOYS["wide"]()
    step, begin = gpu_train.make_step(size, "amp-fp8-delayed")
    params, state = jax.eval_shape(begin, jax.random.key(0))
    after = jax.eval_shape(step, params, state, jax.eval_shape(size.sample, jax.random.key(1)))
    shapes = [
        [leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (after[:2], (params, state))
    ]
    assert shapes[0] == shapes[1]


def test_lengths_share_the_words_of_a_batch():
    """Whatever the length, a batch has as many words, and the fused hand is there."""
    for name, words in {"350m": 16384, "1.3b": 8192, "bert": 16384}.items():
        for length in gpu_models.LENGTHS:
            size = gpu_models.MODELS[f"{name}-{length}"]()
            assert gpu_train.items(size) == words
            assert gpu_train.FUSED in size.hands


def test_models_that_do_not_attend_have_no_fused_hand():
    """Nor a version of `amp` without fused attention."""
    absent = [way for way in gpu_train.WAYS if not gpu_train._exists("resnet50", way, toy=True)]
    assert absent == ["hand-fused", "amp-bf16-composed"]


def test_a_run_that_was_cut_goes_on(tmp_path, monkeypatch):
    """What the file holds is not run again, but for errors and another JAX."""
    row = {"model": "350m", "way": "f32", "toy": True, "jax": jax.__version__}
    row |= {"items_per_second": 1.0, "peak_bytes": None, "first_loss": 9.0, "last_loss": 8.0}
    old = [row, row | {"way": "tf32", "error": "killed"}, row | {"way": "amp-fp8", "jax": "0.1"}]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(old))
    begun = []

    def run(runs, options):
        begun.extend(runs)
        return [row | {"model": model, "way": way} for model, way in runs]

    monkeypatch.setattr(gpu_train, "_in_turn", run)
    words = ["--toy", "--model", "350m", "--way", "f32", "tf32", "amp-fp8", "--json", str(path)]
    assert gpu_train.main(words) == 0
    assert begun == [("350m", "tf32"), ("350m", "amp-fp8")]
    assert [r["way"] for r in json.loads(path.read_text())] == ["f32", "tf32", "amp-fp8"]
    assert gpu_train.main(words) == 0
    assert len(begun) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "way"),
    [("350m", "amp-fp8"), ("350m", "tf32"), ("350m", "hand-fused"), ("bert-512", "hand-fused")],
)
def test_a_toy_run_is_measured(model, way, capsys, monkeypatch):
    """One run in this process: a rate, and losses that move; a CPU tells no peak of memory."""
    monkeypatch.setattr("sys.stdin", io.StringIO(gpu_train.TURN))
    words = ["--here", "--toy", "--model", model, "--way", way, "--steps", "2"]
    assert gpu_train.main(words) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (row["model"], row["way"], row["steps"], row["toy"]) == (model, way, 2, True)
    assert row["items_per_second"] > 0
    assert math.isfinite(row["first_loss"])
    assert row["last_loss"] != row["first_loss"] == row["losses"][0]
    assert len(row["losses"]) == gpu_train.WARM + 2


def test_the_table_has_ratios_and_what_failed(capsys):
    """Against float32 of the same model; a run without a result has its error there."""
    row = {"model": "350m", "peak_bytes": None, "first_loss": 9.0, "last_loss": 8.0}
    rows = [
        row | {"way": "f32", "items_per_second": 10.0},
        row | {"way": "amp-fp8", "items_per_second": 25.0},
        {"model": "350m", "way": "tf32", "error": "out of memory"},
    ]
    gpu_train.show(rows, gpu_train.Console(width=120))
    text = capsys.readouterr().out
    for word in ("2.50", "not told", "out of memory"):
        assert word in text


@pytest.mark.long
def test_runs_stop_between_parts_once_their_time_is_over():
    """The first part is always measured; what came before it is not."""
    size = gpu_train.TOYS["350m"]()
    step, begin = gpu_train.make_step(size, "f32")
    began = begin(jax.random.key(0))
    times, losses = gpu_train._train(step, size, began, steps=2 * gpu_train.PART, seconds=0)
    assert len(times) == 1
    assert len(losses) == gpu_train.WARM + gpu_train.PART


def test_the_page_shows_the_figures_that_are_kept(tmp_path):
    """Each row of the page's table is one of the file's, and a picture is made of them."""
    docs = Path(__file__).parents[2] / "docs"
    rows = json.loads((docs / "gpu_train.json").read_text())
    assert gpu_report.table(rows) in (docs / "performance.md").read_text()
    gpu_report.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
