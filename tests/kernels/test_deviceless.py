"""The kernel compiled by the vendors' compilers, for chips that are not here."""

import json
from pathlib import Path

import pytest

from jaxamp.compiled import deviceless
from jaxamp.compiled.targets import TARGETS

ROOT = Path(__file__).parents[2]


def compiled(target: str, folder: Path, module: str = "tests.kernels.deviceless") -> dict:
    """What a module finds of its programs, compiled in the environment of a target."""
    environment = deviceless.ENVIRONMENTS[TARGETS[target].environment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.delenv("XLA_FLAGS")  # those of the tests' own process, with eight devices
        environment.run("-m", module, target, str(folder))
    return json.loads((folder / "found.json").read_text())


@pytest.mark.deviceless
@pytest.mark.parametrize("target", ["v5e", "v6e", "7x"])
def test_the_kernel_compiles_for_tpu(target, tmp_path):
    """libtpu takes every form, where lowering alone would not show that it refuses."""
    found = compiled(target, tmp_path)
    assert len(found) == 9
    for title, facts in found.items():
        assert "tpu_custom_call" in facts["calls"], title


@pytest.mark.deviceless("h200")
def test_the_kernel_compiles_for_hopper(tmp_path):
    """The saturating conversion, and nothing spilled."""
    found = compiled("h200", tmp_path)
    assert len(found) == 9
    for title, facts in found.items():
        assert "mosaic_gpu_v2" in facts["calls"], title
        assert facts["spilled"], title
        assert not any(facts["spilled"]), title
        assert any("e4m3" in form for form in facts["converts"]), title
