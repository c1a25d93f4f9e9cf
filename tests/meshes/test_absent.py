"""What compiles for eight absent chips in float32 compiles with `amp`; run by `make test-long`."""

from pathlib import Path

import pytest

from jaxamp.compiled.deviceless import ENVIRONMENTS
from jaxamp.compiled.targets import TARGETS
from tests.meshes import absent
from tests.meshes.checks import every_case
from tests.meshes.registry import MESH_PROGRAMS

pytestmark = pytest.mark.deviceless
ROOT = Path(absent.__file__).parents[2]


@pytest.mark.parametrize("name", MESH_PROGRAMS)
@pytest.mark.parametrize("target", ["h200", "v5e"])
def test_compiles_for_eight_chips(target, name, tmp_path, monkeypatch):
    """In both orders and all three formats."""
    environment = ENVIRONMENTS[TARGETS[target].environment]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("XLA_FLAGS")  # those of the tests' own process, with eight devices
    cases = [str(case) for case in every_case() if case.program == name]
    environment.run("-m", absent.__name__, target, str(tmp_path), *cases, quiet=True)
    assert {case: (tmp_path / case).read_text() for case in cases} == dict.fromkeys(cases, "")
