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


def test_rules_of_jax_stay() -> None:
    """Every entry of JAX's tables is the object that was there before jaxamp was imported."""
    _run("from tests.project import tables_of_jax as tables; tables.main()")


def test_a_rule_that_changes_is_seen() -> None:
    """The comparison above finds a lowering that was replaced on purpose."""
    command = [sys.executable, "-m", "tests.project.tables_of_jax", "plant"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "('lowerings', sin, '')" in done.stderr
