"""jaxamp is a guest in the process: importing it loads and changes as little as it can."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxamp.errors import NEWEST_JAX

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


_OLDER = 'jax.__version_info__, jax.__version__ = (0, 9, 2), "0.9.2"'
_NEWER = """
import jax._src.checkify as moved
del moved.error_checks
jax.__version_info__, jax.__version__ = (0, 99, 0), "0.99.0"
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [(_OLDER, r"JAX 0\.9\.2: it is too old"), (_NEWER, r"JAX 0\.99\.0: .*error_checks")],
)
def test_a_jax_of_another_time_is_refused_in_a_sentence(change, words) -> None:
    """Before anything asks it for what it has not: too old, or with a private name that is gone."""
    code = f"""
import jax, traceback
{change}
try:
    import jaxamp
except ImportError as error:
    print(*traceback.format_exception(error)[-1:])
    print(error.__suppress_context__)
"""
    said = _run(code)
    assert re.search(rf"does not run on {words}.*Install a JAX from 0\.10\.2 to 0\.\d+", said), said
    assert said.endswith("True\n")


def test_an_error_from_inside_says_that_a_jax_is_untested() -> None:
    """On a JAX newer than the tests', where a structure that a rule reads may have changed."""
    code = """
import jax, jax.numpy as jnp
jax.__version_info__, jax.__version__ = (0, 99, 0), "0.99.0"
import jaxamp, jaxamp.plan, jaxamp.run.rewriting as rewriting
fn = jaxamp.amp(lambda x: x @ x)
print(fn(jnp.eye(2)).dtype)
def rewrite(*_):
    raise KeyError("num_consts")
rewriting.rewrite = rewrite
try:
    jaxamp.amp(lambda x: x @ x)(jnp.eye(2))
except KeyError as error:
    print(error.__notes__)
"""
    said = _run(code)
    assert said.startswith("float32\n")
    assert re.search(r"This is JAX 0\.99\.0, and jaxamp is tested up to JAX 0\.\d+", said), said


def test_rules_of_jax_stay() -> None:
    """Every entry of JAX's tables is the object that was there before jaxamp was imported."""
    _run("from tests.project import tables_of_jax as tables; tables.main()")


def test_a_rule_that_changes_is_seen() -> None:
    """The comparison above finds a lowering that was replaced on purpose."""
    command = [sys.executable, "-m", "tests.project.tables_of_jax", "plant"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "('lowerings', sin, '')" in done.stderr


def test_the_newest_jax_is_on_the_page_of_versions() -> None:
    """The page, and the words of an error, name the same release."""
    page = (Path(__file__).parents[2] / "docs/stability.md").read_text()
    assert f"| {NEWEST_JAX}." in page
