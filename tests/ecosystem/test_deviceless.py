"""What four TPUs that are not here would send to each other; run by `make test-long`."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks import collectives
from benchmarks.collectives.__main__ import main

pytestmark = pytest.mark.deviceless("v5e")
KINDS = ("all-gather", "all-reduce", "reduce-scatter")
ROOT = Path(collectives.__file__).parents[2]


@pytest.mark.parametrize("style", ["jit", "shard_map"])
def test_parameters_are_gathered_in_half_the_bytes(style, tmp_path, monkeypatch):
    """On a 2x2 mesh, in both orders; gradients are added up in f32 unless the policy says other."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("XLA_FLAGS")  # those of the tests' own process, with eight devices
    main(["--only", f"{style} fsdp", "--json", str(tmp_path / "found.json")])
    gathered, summed = defaultdict(dict), defaultdict(dict)
    rows = json.loads((tmp_path / "found.json").read_text())
    for row in (row for row in rows if row["strategy"] == "fsdp"):  # others reduce activations, too
        for op, dtype, count in row["bytes"]:
            if dtype in ("f32", "bf16") and op in KINDS:
                told = (gathered if op == "all-gather" else summed)[row["variant"]]
                told[dtype] = told.get(dtype, 0) + count
    assert gathered["f32"].keys() == summed["f32"].keys() == {"f32"}
    for variant in ("grad(amp)", "amp(grad)", "amp(grad), bf16 sums"):
        assert gathered[variant].keys() == {"bf16"}
        assert gathered[variant]["bf16"] <= gathered["f32"]["f32"] / 2
    for variant in ("grad(amp)", "amp(grad)"):
        assert summed[variant] == summed["f32"]
    assert summed["amp(grad), bf16 sums"]["bf16"] == pytest.approx(
        summed["f32"]["f32"] / 2, rel=0.01
    )
