"""The core without its features: `python -m tests.project.removable` takes their folders away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.imports import imports
from tests.project.removable import ALL, FEATURES, LONG, SHARED, SHORT, left_without, main
from tests.project.test_floors import PACKAGE


def test_the_core_stands_alone() -> None:
    """Without any feature, the core's tests pass."""
    assert main([ALL], SHORT) == 0


@pytest.mark.long
@pytest.mark.minutes
@pytest.mark.parametrize("case", [*FEATURES, ALL])
def test_each_feature_can_be_taken_away(case: str) -> None:
    assert main([case], LONG) == 0


PLANNING = {"cancellation", "found", "quantized", "xla", "modules"}
"""The rooms of the features that take part in planning and rewriting."""


def test_what_plans_needs_no_other_feature() -> None:
    """Not lazily either; `test_each_feature_can_be_taken_away` is long."""
    pairs = ((i.importer.split(".")[1:2], i.imported.split(".")[1:2], i) for i in imports(PACKAGE))
    rooms = [(*a, *b, i) for a, b, i in pairs if a and b and a != b]
    assert [str(i) for a, b, i in rooms if {a, b} <= PLANNING] == []


def test_every_folder_is_of_the_core_or_of_a_feature() -> None:
    """What is not taken away is what the core is said to be."""
    core = {"core", "interop", "jaxprs", "plan", "policy", "rewrite", "run", "trace", *SHARED}
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name[0] != "_"}
    assert folders - core == {name for names in FEATURES.values() for name in names}


@pytest.mark.parametrize("feature", sorted(PLANNING))
def test_nothing_but_a_feature_needs_its_folder(feature: str, tmp_path: Path) -> None:
    """Without what plans, every other module can be imported: reports, training, tools."""
    left_without(FEATURES[feature], tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, feature],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


IMPORT_ALL = """
import importlib, pkgutil, sys, jaxamp
assert not importlib.util.find_spec(f"jaxamp.{sys.argv[1]}")
for module in pkgutil.walk_packages(jaxamp.__path__, "jaxamp."):
    if not module.name.startswith(("jaxamp.interop.", "jaxamp.__main__")):  # of other libraries
        importlib.import_module(module.name)
"""
