"""The benchmark of a GPU's FP8, at toy size on a CPU: it makes every row, and compares rightly."""

import pytest

from benchmarks import gpu_fp8


def test_every_row_with_a_goal_is_made(monkeypatch):
    """Quantizing against a copy, products per tensor against bf16."""
    monkeypatch.setattr(gpu_fp8, "REPEATS", 1)
    monkeypatch.setattr(gpu_fp8, "TIMINGS", 1)
    rows = [*gpu_fp8.quantizing(gpu_fp8.TOY), *gpu_fp8.products(gpu_fp8.TOY)]
    assert all(row.seconds > 0 and row.ratio > 0 for row in rows)
    goals = {row.name: row.goal for row in rows if row.goal is not None}
    assert goals == {"block_quantize 1 x 128": 0.8, "FP8 per tensor": 1.5}


@pytest.mark.long
def test_kernels_are_those_of_the_reference_and_the_interpreter():
    """Bit by bit."""
    found = list(gpu_fp8.comparisons(gpu_fp8.TOY))
    assert {title for _, title, _ in found} == {"reference", "interpreter"}
    for name, _, difference in found:
        assert difference == 0, name


def test_a_real_run_needs_a_gpu(monkeypatch):
    """It says so rather than measure a CPU."""
    monkeypatch.setattr("sys.argv", ["gpu_fp8"])
    with pytest.raises(SystemExit, match="no GPU here"):
        gpu_fp8.main()
