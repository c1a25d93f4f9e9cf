"""The training benchmark: its steps, and the sizes of its models. `--toy` runs it on a CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from benchmarks import (
    gpu_report,
    gpu_train,
    on_a_gpu,
    predicted,
    real_images,
)
from tests import audit

ROOT = Path(__file__).parents[2]
PLAINER_WAYS = ("f32", "hand-bf16")
MILLIONS = {"350m": 355, "1.3b": 1312, "resnet50": 25.6, "vit-b": 86.4}


@pytest.mark.parametrize(
    "way",
    ["hand-fused", "amp-f16", *(pytest.param(w, marks=pytest.mark.long) for w in PLAINER_WAYS)],
)
def test_a_step_keeps_float32_and_multiplies_as_its_way_says(way):
    """Parameters and moments stay float32; products are float32, bf16 or f16."""
    size = gpu_train.TOYS["350m"]()
    step, begin = gpu_train.make_step(size, gpu_train.WAYS[way])
    params, state = begin(jax.random.key(0))
    traced = step.trace(params, state, size.sample(jax.random.key(1)))
    kept = jax.tree.leaves((params, state))
    assert [leaf.dtype for leaf in jax.tree.leaves(traced.out_info)[:-1]] == [x.dtype for x in kept]
    formats = {"f32": jnp.float32, "amp-f16": jnp.float16}
    expected = formats.get(way, jnp.bfloat16)
    products = [p for p in audit.products(traced.jaxpr.jaxpr) if p.is_float]
    low = [p for p in products if set(p.operands) == {jnp.dtype(expected)}]
    assert len(low) >= 0.8 * len(products) > 0


@pytest.mark.product
@pytest.mark.parametrize("name", MILLIONS)
def test_sizes_are_those_of_their_names(name):
    """Parameters of the full models, counted from shapes alone."""
    shapes = jax.eval_shape(gpu_train.MODELS[name]().init, jax.random.key(0))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert math.isclose(count / 1e6, MILLIONS[name], rel_tol=0.2)


def test_language_models_read_real_text():
    """Passages of a standard library's sources: most bytes are letters, blanks and line ends."""
    tokens = gpu_train.TOYS["350m"]().sample(jax.random.key(0))
    words = bytes(tokens.reshape(-1).tolist()).decode("ascii")
    assert sum(c.isalpha() or c.isspace() for c in words) > 0.5 * len(words)
    assert len(set(words)) > 20


@pytest.mark.parametrize("measures", [True, False])
@pytest.mark.parametrize("way", ["amp-fp8-delayed", "amp-fp8-carried"])
def test_delayed_scaling_keeps_its_history_in_the_state(way, measures):
    """A step returns what it takes, the history included."""
    size = gpu_train.TOYS["wide"]()
    step, begin = gpu_train.make_step(size, gpu_train.WAYS[way], measures=measures)
    params, state = jax.eval_shape(begin, jax.random.key(0))
    after = jax.eval_shape(step, params, state, jax.eval_shape(size.sample, jax.random.key(1)))
    shapes = [
        [leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (after[:2], (params, state))
    ]
    assert shapes[0] == shapes[1]


def test_models_that_do_not_attend_have_no_fused_hand():
    """Nor a version of `amp` without fused attention."""
    absent = [way for way in gpu_train.WAYS if not gpu_train._exists("resnet50", way, toy=True)]
    assert absent == ["hand-fused", "amp-bf16-composed"]


def test_a_run_that_was_cut_goes_on(tmp_path):
    """What the file holds is not timed again, but for errors and another JAX."""
    row = {"model": "350m", "toy": True, "jax": jax.__version__, "rounds": [1.0, 3.0]}
    old = [row | {"way": "f32"}, row | {"way": "tf32", "error": "killed"}]
    old += [row | {"way": "amp-fp8", "jax": "0.1"}, row | {"way": "hand-bf16", "rounds": [1.0]}]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(old))
    file = gpu_train.File(path, toy=True)
    ways = ("f32", "tf32", "amp-fp8", "hand-bf16")
    assert [file.rounds("350m", way) for way in ways] == [2, 0, 0, 1]


def test_a_run_on_another_device_has_a_file_of_its_own(tmp_path):
    """A median of rounds on two devices would be that of none."""
    path = tmp_path / "rows.json"
    row = {"model": "350m", "way": "f32", "toy": True, "jax": jax.__version__, "rounds": [1.0]}
    path.write_text(json.dumps([row | {"device": "NVIDIA H100"}]))
    with pytest.raises(SystemExit, match=r"rows\.json has rows of NVIDIA H100.*--json"):
        gpu_train.File(path, toy=True).check("NVIDIA H200")


@pytest.mark.long
@pytest.mark.parametrize("way", gpu_train.WAYS)
def test_every_way_is_timed(way, tmp_path):
    """Medians of rounds, spreads, memory, and losses that move and are finite."""
    words = ["--toy", "--model", "wide", "--way", way, "--rounds", "2", "--seconds", "0.05"]
    path = tmp_path / "rows.json"
    assert on_a_gpu.main([*words, "--json", str(path), "--folder", str(tmp_path / "run")]) == 0
    (row,) = json.loads(path.read_text())
    assert (row["model"], row["way"], len(row["rounds"])) == ("wide", way, 2)
    assert min(row["rounds"]) <= row["items_per_second"] <= max(row["rounds"])
    assert row["peak_bytes"] > row["temporary_bytes"] > 0
    assert row["losses"][-1] != row["first_loss"]
    assert all(map(math.isfinite, row["losses"]))


def test_images_are_real():
    """Digits in their classes, of the size that is asked for."""
    images, labels = real_images.labelled(jax.random.key(0), 6, 16)
    assert images.shape == (6, 16, 16, 3)
    assert set(labels.tolist()) <= set(range(10))


def test_one_that_fails_leaves_the_others_be(tmp_path):
    """Its error is kept, and is tried again by the next call."""
    file = gpu_train.File(tmp_path / "rows.json", toy=True)
    with gpu_train._noted(file, "350m", "f32", True):
        raise ValueError("out of memory\nand more")
    (row,) = json.loads(file.path.read_text())
    assert row["error"] == "out of memory"
    assert gpu_train.File(file.path, toy=True).rows == {}


@pytest.mark.long
def test_runs_stop_between_parts_once_their_time_is_over():
    """The first part is always measured; what came before it is not."""
    size = gpu_train.TOYS["350m"]()
    step, begin = gpu_train.make_step(size, gpu_train.WAYS["f32"])
    version = gpu_train.Version(size, [step], begin)
    times, losses = version.train(steps=2 * gpu_train.PART, seconds=0)
    assert len(times) == 1
    assert len(losses) == gpu_train.WARM + gpu_train.PART


def test_the_page_shows_the_figures_that_are_kept():
    """The page's table is the file's."""
    rows = json.loads((ROOT / gpu_report.FIGURES).read_text())
    shown = (ROOT / gpu_report.PAGE).read_text().partition(gpu_report.BEGIN)[2]
    assert shown.partition(gpu_report.END)[0].strip().splitlines() == [*on_a_gpu.table(rows)]
    assert all(row["device"] == "NVIDIA H200" and len(row["rounds"]) > 1 for row in rows)


@pytest.mark.long
def test_a_picture_is_made_of_the_figures(tmp_path):
    rows = json.loads((ROOT / gpu_report.FIGURES).read_text())
    gpu_report.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_the_page_shows_the_times_by_the_model():
    """It is made from the two files; a row that is off by more than a quarter is explained."""
    timed, modelled = (
        json.loads((ROOT / path).read_text()) for path in (predicted.TIMED, predicted.PREDICTED)
    )
    shown = (ROOT / predicted.PAGE).read_text().partition(predicted.BEGIN)[2]
    assert shown.partition(predicted.END)[0].strip() == predicted.table(timed, modelled)
    off = predicted.errors(timed, modelled)
    assert len(off) == len(timed)
    assert not any(map(predicted.unexplained, off.items()))


def test_the_model_as_it_is_gives_the_times_that_are_kept():
    """Bytes and products at the shares that are reached, and the start of every kernel."""
    reached = predicted.CHIP.reached
    for row in json.loads((ROOT / predicted.PREDICTED).read_text()):
        parts = row["by_memory"] + row["by_products"] + row["by_starts"]
        assert row["seconds"] == pytest.approx(parts)
        assert row["by_starts"] == pytest.approx(row["kernels"] * reached.start)
        assert row["seconds"] > row["bytes"] / predicted.CHIP.bandwidth / 2


class Event:
    """An event of a profile."""

    def __init__(self, name: str, duration_ns: float) -> None:
        self.name, self.duration_ns = name, duration_ns


def test_kernels_are_those_of_a_devices_streams():
    def line(name, *events):
        return SimpleNamespace(name=name, events=events)

    device = SimpleNamespace(
        name="/device:GPU:0",
        lines=[line("Stream #13(Compute)", Event("fusion", 2e6)), line("XLA Ops", Event("x", 1e6))],
    )
    host = SimpleNamespace(name="/host:CPU", lines=[line("Stream #1", Event("y", 1e6))])
    assert on_a_gpu.kernels(SimpleNamespace(planes=[device, host])) == [("fusion", 2.0)]


def timed(way, ms, **facts):
    row = {"model": "ssd", "way": way, "ms": ms, "spread": 0.01, "rounds": [1.0], "device": "A"}
    row |= {"tracing_seconds": 1.0, "compiling_seconds": 2.0, "peak_bytes": 2**30}
    return row | {"busy_ms": ms, "kernels": [(f"kernel of {way}", 4, ms)]} | facts


def test_a_row_is_shown_beside_the_hand_and_the_worst_by_kernels():
    rows = [timed("hand-bf16", 9.0), timed("amp-bf16", 10.0), timed("amp-loss-bf16", 8.0)]
    words = "\n".join(on_a_gpu.report([*rows, {"model": "x", "way": "y", "error": "too large"}]))
    assert "| ssd | amp-bf16 | 10.00 | 1.0 % | 10.00 | 1.00 | 1.0 + 2.0 | 0.900 |" in words
    assert words.index("kernel of hand-bf16") < words.index("kernel of amp-bf16")
    assert "x y: too large" in words


def test_figures_of_two_devices_are_not_mixed(tmp_path):
    path = tmp_path / "rows.json"
    on_a_gpu.keep([timed("hand-bf16", 9.0)], path)
    on_a_gpu.keep([timed("hand-bf16", 8.0), timed("amp-bf16", 9.0)], path)
    assert [row["ms"] for row in json.loads(path.read_text())] == [8.0, 9.0]
    with pytest.raises(SystemExit, match=r"mix A, B.*--json"):
        on_a_gpu.keep([timed("amp-bf16", 9.0, device="B")], path)


def test_every_row_that_is_asked_of_a_gpu_exists():
    """The strongest hand comes first."""
    for model, ways in on_a_gpu.ROWS.items():
        assert all(gpu_train._exists(model, way, toy=True) for way in ways)
        fused = gpu_train.FUSED in gpu_train.TOYS[model]().hands
        assert ways[0] == ("hand-fused" if fused else "hand-bf16")


@pytest.mark.long
@pytest.mark.minutes
def test_the_one_command_is_cut_and_goes_on(tmp_path, capfd):
    """Two processes take turns; what one call has timed the next one keeps."""
    words = ["--toy", "--model", "decode", "ssd", "--rounds", "2", "--seconds", "0.05"]
    words += ["--json", str(tmp_path / "rows.json"), "--folder", str(tmp_path / "run")]
    assert on_a_gpu.main([*words, "--minutes", "0"]) == 1
    assert on_a_gpu.main([*words, "--minutes", "9"]) == 0
    kept = json.loads((tmp_path / "rows.json").read_text())
    assert {row["model"] for row in kept} == {"decode", "ssd"}
    assert all(len(row["rounds"]) == 2 for row in kept)
    assert on_a_gpu.main([*words, "--minutes", "9"]) == 0
    assert json.loads((tmp_path / "rows.json").read_text()) == kept
    assert "5 of 5 rows are whole" in capfd.readouterr().out
