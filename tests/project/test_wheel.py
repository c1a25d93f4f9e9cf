"""The wheel runs in a fresh environment with its declared dependencies alone."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import jaxamp

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


_OURS = "PYTHONPATH", "XLA_FLAGS"  # of the tests, whose flags another JAX may not know


def _interpreters():
    """Interpreters that are here, by version: this one, pyenv's, and those on the path."""
    found = {}
    for version in ("3.11", "3.12", "3.13", "3.14"):
        places = [*map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
        if sys.version.startswith(f"{version}."):
            places = [sys.executable]
        places.append(shutil.which(f"python{version}") or "")
        if places[0]:
            found[version] = places[0]
    return found


PYTHONS = _interpreters()


def run(*command: object, cwd: Path) -> str:
    """What a command prints, which has to succeed."""
    alone = {name: word for name, word in os.environ.items() if name not in _OURS}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel and an sdist of this tree, by the build backend that pyproject.toml names."""
    folder = tmp_path_factory.mktemp("built")
    venv.create(folder / "builder", with_pip=True)
    python = folder / "builder/bin/python"
    run(python, "-m", "pip", "install", "-q", "hatchling>=1.26", cwd=folder)
    run(python, "-m", "hatchling", "build", "-d", folder / "dist", cwd=ROOT)
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return wheel, sdist, python


def test_the_distribution_has_a_name_of_its_own():
    """Not that of another package; the import has it, and messages and docs say so."""
    assert PROJECT["name"] == "jax-mixed-precision"
    assert f"`{PROJECT['name']}`" in (ROOT / "README.md").read_text()
    own = [r for rs in PROJECT["optional-dependencies"].values() for r in rs if "[" in r]
    assert f"{PROJECT['name']}[demo,serve]" in own
    assert not any(re.match(r"jaxamp\b", requirement) for requirement in own)


@pytest.mark.long
@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_runs_with_its_declared_dependencies(version, built, tmp_path):
    """README, report, explain, training and commands; none of the libraries beside it is there."""
    wheel, _, _ = built
    assert wheel.name.startswith("jax_mixed_precision-")
    run(PYTHONS[version], "-m", "venv", tmp_path / "fresh", cwd=tmp_path)
    python = tmp_path / "fresh/bin/python"
    run(python, "-m", "pip", "install", "-q", wheel, cwd=tmp_path)
    listed = run(python, "-m", "pip", "list", "--format=freeze", cwd=tmp_path)
    assert re.search(r"^jax-mixed-precision==", listed, re.MULTILINE)
    for name in ("equinox", "flax", "haliax", "jinja2", "jmp", "optax", "rich"):
        assert not re.search(rf"^{name}==", listed, re.MULTILINE)
    program = python, "-I", ROOT / "tests/project/bare_wheel.py", ROOT / "README.md"
    assert run(*program, cwd=tmp_path).endswith(f"ran {jaxamp.__version__}\n")
    asked = python, "-m", "jaxamp", "report", "jax.numpy:dot", "--args", "f32[8,8]", "f32[8,8]"
    assert "100 % of the FLOPs" in run(*asked, cwd=tmp_path)
    run(python, "-m", "pip", "install", "-q", f"{wheel}[report]", cwd=tmp_path)
    assert run(*program, cwd=tmp_path).endswith(f"ran {jaxamp.__version__}\n")
    run(*asked, "--html", "report.html", cwd=tmp_path)
    assert "<!doctype html>" in (tmp_path / "report.html").read_text()


@pytest.mark.long
def test_examples_of_libraries_run_on_the_wheel(built, tmp_path):
    """equinox and flax nnx with what the examples need, and no source tree on the path."""
    wheel, _, _ = built
    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh/bin/python"
    run(python, "-m", "pip", "install", "-q", f"{wheel}[demo]", "flax>=0.12", cwd=tmp_path)
    for name in ("equinox_cnn.py", "nnx_cnn.py"):
        run(python, "-I", ROOT / "examples" / name, "--epochs", 1, cwd=tmp_path)


@pytest.mark.long
def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    """File by file, and with the tests, docs and licence that are shipped."""
    wheel, sdist, python = built
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    for name in ("LICENSE", "README.md", "docs/index.md", "tests/conftest.py", "CHANGELOG.md"):
        assert (source / name).is_file()
    run(python, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "again", cwd=source)
    (again,) = (tmp_path / "again").glob("*.whl")

    def contents(path):
        with zipfile.ZipFile(path) as file:
            return {name: file.read(name) for name in file.namelist()}

    assert contents(again) == contents(wheel)


CHECK = runpy.run_path(str(ROOT / ".ci/check_release.py"))["faults"]


def _tree(
    folder, *, version="1.2.3", heading="## 1.2.3 (2026-11-27)", unreleased="", cited="1.2.3"
):
    (folder / "jaxamp").mkdir()
    (folder / "jaxamp/__init__.py").write_text(f'__version__ = "{version}"\n')
    (folder / "CITATION.cff").write_text(f"version: {cited}\n")
    text = f"# Changelog\n\n## Unreleased\n{unreleased}\n{heading}\n\n* A feature.\n"
    (folder / "CHANGELOG.md").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("tag", "words", "fault"),
    [
        ("v1.2.3", {}, ""),
        ("v1.2.3", {"version": "1.2.2"}, "__version__"),
        ("1.2.3", {}, "begins with v"),
        ("v1.2.3", {"heading": "## 1.2.2 (2026-11-20)"}, "CHANGELOG.md has no heading"),
        ("v1.2.3", {"unreleased": "\n* Something.\n"}, "Unreleased"),
        ("v1.2.3", {"cited": "1.2.2"}, "CITATION.cff"),
    ],
)
def test_a_release_is_checked(tag, words, fault, tmp_path):
    """Tag, version, changelog and citation agree, or a sentence says which does not."""
    found = CHECK(tag, _tree(tmp_path, **words))
    assert len(found) == bool(fault)
    assert fault in "".join(found)


def test_this_tree_could_be_released(tmp_path):
    """With a heading for its version in the changelog, which is what is left to do."""
    copied = _tree(tmp_path, version=jaxamp.__version__, heading=f"## {jaxamp.__version__} (x)")
    (copied / "CITATION.cff").write_text((ROOT / "CITATION.cff").read_text())
    assert CHECK(f"v{jaxamp.__version__}", copied) == []
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    assert ".ci/check_release.py" in workflow
    assert "id-token: write" in workflow
