"""The training benchmark: its steps, and the sizes of its models. `--toy` runs it on a CPU."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import gpu_report, gpu_train
from tests import audit


@pytest.mark.parametrize("way", ["f32", "hand-bf16", "amp-f16"])
def test_a_step_keeps_float32_and_multiplies_as_its_way_says(way):
    """Parameters and moments stay float32; products are float32, bf16 or f16."""
    size = gpu_train.TOYS["350m"]()
    step, begin = gpu_train.make_step(size, way)
    params, state = begin(jax.random.key(0))
    traced = step.trace(params, state, size.sample(jax.random.key(1)))
    kept = jax.tree.leaves((params, state))
    assert [leaf.dtype for leaf in jax.tree.leaves(traced.out_info)[:-1]] == [x.dtype for x in kept]
    expected = {"f32": jnp.float32, "hand-bf16": jnp.bfloat16, "amp-f16": jnp.float16}[way]
    products = [p for p in audit.products(traced.jaxpr.jaxpr) if p.is_float]
    low = [p for p in products if set(p.operands) == {jnp.dtype(expected)}]
    assert len(low) >= 0.8 * len(products) > 0


def test_sizes_are_those_of_their_names():
    """Parameters of the full models, counted from shapes alone."""
    for name, millions in {"350m": 355, "1.3b": 1312, "resnet50": 25.6, "vit-b": 86.4}.items():
        shapes = jax.eval_shape(gpu_train.MODELS[name]().init, jax.random.key(0))
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
        assert math.isclose(count / 1e6, millions, rel_tol=0.2), (name, count)


@pytest.mark.long
@pytest.mark.parametrize("way", ["amp-fp8", "tf32"])
def test_a_toy_run_is_measured(way, capsys, monkeypatch):
    """One run in this process: a rate, and losses that move; a CPU tells no peak of memory."""
    monkeypatch.setattr("sys.stdin", io.StringIO(gpu_train.TURN))
    words = ["--here", "--toy", "--model", "350m", "--way", way, "--steps", "2"]
    assert gpu_train.main(words) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (row["model"], row["way"], row["steps"], row["toy"]) == ("350m", way, 2, True)
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
