"""The kernels compiled by the vendors' compilers, for chips that are not here."""

import json
from pathlib import Path

import pytest

from jaxamp.compiled import environments
from jaxamp.compiled.targets import TARGETS

ROOT = Path(__file__).parents[2]


def compiled(target: str, folder: Path, programs: str = "tests.kernels.deviceless") -> dict:
    """What a module finds that compiles programs in the environment of a target."""
    environment = environments.ENVIRONMENTS[TARGETS[target].environment]
    if not environment.ready:
        pytest.skip(
            f"the compiler is not installed: python -m jaxamp estimate --install {environment.name}"
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.delenv("XLA_FLAGS")  # those of the tests' own process, with eight devices
        environment.run("-m", programs, target, str(folder))
    return json.loads((folder / "found.json").read_text())


@pytest.mark.deviceless
@pytest.mark.parametrize("target", ["v5e", "v6e", "7x"])
def test_kernels_compile_for_tpu(target, tmp_path):
    """libtpu takes every form, where lowering alone would not show that it refuses."""
    found = compiled(target, tmp_path)
    assert len(found) == 17
    for title, facts in found.items():
        assert "tpu_custom_call" in facts["calls"], title


@pytest.mark.deviceless
def test_products_of_blocks_compile_for_four_b200(tmp_path):
    """Three calls each; weights' gradients are added up, and no activations are gathered."""
    found = compiled("b200", tmp_path, "tests.quantized.kernels.divided_products")
    for facts in found.values():
        assert facts["calls"] == ["__cudnn$blockScaledDot"] * 3
    assert found["data"]["sent"] == {"all-reduce": 1}
    assert found["parts"]["sent"] == {"all-gather": 2, "all-reduce": 1}


@pytest.mark.deviceless
def test_kernels_compile_for_hopper(tmp_path):
    """FP8 tensor-core instructions, the saturating conversion, and nothing spilled."""
    found = compiled("h200", tmp_path)
    assert len(found) == 15
    for title, facts in found.items():
        assert "mosaic_gpu_v2" in facts["calls"], title
        assert facts["spilled"], title
        assert not any(facts["spilled"]), title
        multiplies = title.startswith("block_scaled_matmul")
        assert multiplies == any("e4m3.e4m3" in form for form in facts["wgmma"]), title
        assert multiplies != any("e4m3" in form for form in facts["converts"]), title
