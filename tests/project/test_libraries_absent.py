"""A library at another version costs the tests that need it, and does not stop collection."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.libraries import ROOT, asked_in_vain, broken_library


def _plant(folder: Path, name: str, source: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(source)


def test_collection_goes_on(tmp_path: Path) -> None:
    """Tests of libraries that raise, or lack a name, are skipped in words; others are collected."""
    _plant(tmp_path, "haliax", "raise AttributeError('jax.core.gone')")
    _plant(tmp_path, "equinox", "")
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    places = ["tests/interop", "jaxamp/interop", "tests/core/test_errors.py"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [*command, *places], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "tests/core/test_errors.py::" in done.stdout
    assert "tests/interop/test_haliax.py::" not in done.stdout
    assert "haliax cannot be imported here: AttributeError: jax.core.gone" in done.stdout
    assert "equinox cannot be imported here: AttributeError: module 'equinox' has" in done.stdout


def _raised(statement: str) -> BaseException:
    """What one of our modules meets that consists of `statement`."""
    with pytest.raises(Exception) as caught:
        exec(compile(statement, str(ROOT / "tests/planted.py"), "exec"), {})
    return caught.value


@pytest.mark.parametrize(
    "source", ["raise AttributeError('gone')", "import no_such_module", "1 / 0", ""]
)
def test_what_a_library_raises_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """Any exception of its import, and a name that this version lacks."""
    _plant(tmp_path, "planted_library", source)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "planted_library", raising=False)
    assert broken_library(_raised("from planted_library import name")) == "planted_library"


def test_a_library_that_is_not_there_is_named() -> None:
    """Without its dots."""
    assert broken_library(_raised("import no_such_library.part")) == "no_such_library"


def test_a_library_that_lacks_an_attribute_is_named() -> None:
    """As a class that one of our modules derives from."""
    assert broken_library(_raised("import optax\nclass C(optax.gone): pass")) == "optax"


@pytest.mark.parametrize(
    "statement",
    [
        "import jaxamp.gone",
        "from jaxamp import gone",
        "1 / 0",
        "from json import gone",
        "import json; json.loads('')",
        "from numpy import gone",
        "import numpy; numpy.zeros(-1)",
        "import jax; jax.gone",
    ],
)
def test_no_other_error_is_forgiven(statement: str) -> None:
    """Ours, calls of a library, and what jaxamp cannot do without."""
    assert broken_library(_raised(statement)) is None


def test_a_library_that_jax_has_left_behind_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one whose own line asked; not what it was asked with, and not a name of its own."""
    _plant(tmp_path, "left_behind", "import jax\ndef f(): jax.gone\ndef g(): f.gone")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert asked_in_vain(_raised("import left_behind as p; p.f()")) == "left_behind"
    assert asked_in_vain(_raised("import left_behind as p; p.g()")) is None
    assert asked_in_vain(_raised("import jax; jax.gone")) is None
    assert asked_in_vain(_raised("import jax.core; jax.core.gone")) is None
    assert asked_in_vain(_raised("1 / 0")) is None
