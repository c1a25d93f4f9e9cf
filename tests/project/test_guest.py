"""jaxamp is a guest in the process: importing it loads and changes as little as it can."""

from __future__ import annotations

import subprocess
import sys

import pytest

ELSEWHERE = ["scipy", "jinja2", "rich", "optax", "equinox", "jmp", "flatbuffers"]


def _run(code: str) -> str:
    """What a program prints that runs in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    """Modules that importing jaxamp loads and importing JAX does not, by name."""
    code = "import sys, jax; known = {*sys.modules}; import jaxamp; print(*{*sys.modules} - known)"
    return set(_run(code).split())


@pytest.mark.parametrize("name", ELSEWHERE)
def test_packages_are_loaded_where_they_are_used(loaded: set[str], name: str) -> None:
    """Importing jaxamp does not import what only parts of it use."""
    assert "jaxamp" in loaded
    assert name not in loaded


def test_the_planner_is_loaded_with_the_first_function(loaded: set[str]) -> None:
    """Importing jaxamp loads neither planner nor rewriter nor kernel; of features, their words."""
    parts = ("jaxamp.plan", "jaxamp.rewrite", "jaxamp.kernels", "jaxamp.compiled")
    assert [name for name in loaded if name.startswith(parts)] == []
    features = ("jaxamp.found.", "jaxamp.quantized.", "jaxamp.xla.")
    assert {name for name in loaded if name.startswith(features)} == {
        *(f"{feature}feature" for feature in features),
        "jaxamp.quantized.scaled_presets",
        "jaxamp.quantized.scaling",
        "jaxamp.xla.hints",
        "jaxamp.xla.hints.techniques",
    }


def test_what_is_loaded_late_costs_no_trace() -> None:
    """The first function of a process runs once for two equal calls."""
    code = """
import jaxamp, numpy as np
runs = []
fn = jaxamp.amp(lambda x: runs.append(x) or x @ x)
fn(np.eye(2)), fn(np.eye(2)), print(len(runs))
"""
    assert _run(code) == "1\n"


def test_an_older_jax_is_refused_in_a_sentence() -> None:
    """Before anything asks it for what it has not."""
    code = """
import jax
jax.__version_info__, jax.__version__ = (0, 9, 2), "0.9.2"
try:
    import jaxamp
except ImportError as error:
    print(error)
"""
    assert _run(code) == "jaxamp needs JAX 0.10.2 or newer; JAX 0.9.2 is installed.\n"


def test_rules_of_jax_stay() -> None:
    """Every entry of JAX's tables is the object that was there before jaxamp was imported."""
    _run("from tests.project import tables_of_jax as tables; tables.main()")


def test_a_rule_that_changes_is_seen() -> None:
    """The comparison above finds a lowering that was replaced on purpose."""
    command = [sys.executable, "-m", "tests.project.tables_of_jax", "plant"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "('lowerings', sin, '')" in done.stderr
