"""The core without its features: `python -m tests.project.removable` takes their folders away."""

from __future__ import annotations

import pytest

from tests.project.removable import ALL, FEATURES, LONG, SHARED, SHORT, main
from tests.project.test_floors import PACKAGE


def test_the_core_stands_alone() -> None:
    """Without any feature, the core's tests pass."""
    assert main([ALL], SHORT) == 0


@pytest.mark.long
@pytest.mark.parametrize("case", [*FEATURES, ALL])
def test_each_feature_can_be_taken_away(case: str) -> None:
    assert main([case], LONG) == 0


def test_every_folder_is_of_the_core_or_of_a_feature() -> None:
    """What is not taken away is what the core is said to be."""
    core = {"core", "interop", "jaxprs", "plan", "policy", "rewrite", "run", "trace", *SHARED}
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name[0] != "_"}
    assert folders - core == {name for names in FEATURES.values() for name in names}
