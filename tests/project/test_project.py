"""The project's own promises: README code runs, its commands exist, CI runs what it names."""

import re
import tomllib
from pathlib import Path

import pytest

import jaxamp

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def _targets() -> set[str]:
    """The names that `make` accepts."""
    return set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))


def test_readme_names_targets_that_exist():
    """Every `make something` of the README and of CI is a target."""
    text = README + (ROOT / ".ci/run").read_text()
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE))
    assert named >= {"demo", "test", "test-long", "lint", "conformance"}
    assert named <= _targets()


def test_the_readme_is_a_door():
    """Two minutes of reading to a report of one's own program; one picture, one table."""
    before, _, _ = README.partition("jaxamp.report(")
    assert len(before.split()) < 2 * 200
    measured = README.partition("## Measured")[2].partition("\n## ")[0]
    assert measured.count("\n|---|") == 1
    assert README.count("![") == 1
    assert "docs/peers.md" in README


def test_ci_runs_the_readme_test_command():
    """CI runs lint, tests on both ends of JAX, samples and docs, and stops at a failure."""
    lines = (ROOT / ".ci/run").read_text().splitlines()
    samples = {"test-long EVERY=200 SAMPLE=300", "test-newest EVERY=4 SAMPLE=300"}
    targets = {"lint", "test", "docs", *samples}
    assert {f"make {target}" for target in targets} <= set(lines)
    assert "set -euo pipefail" in lines


def test_both_ends_of_jax_have_a_target():
    """The oldest supported JAX and the newest, the conformance sample on both."""
    assert "\nSAMPLE ?= 600\n" in MAKEFILE
    for target in ("test-long:", "test-here:"):
        recipe = MAKEFILE.partition(target)[2].partition("\n\n")[0]
        assert "tests.conformance --sample $(SAMPLE)" in recipe


def test_presets_shown_are_the_presets():
    """The table of presets says what the code says."""
    page = (ROOT / "docs/how-to/policy.md").read_text()
    policies = page.partition("## The presets")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `((?:always|mixed)\w+)`[^|]*\|(.*)\|$", policies, re.MULTILINE)
    assert {name for name, _ in rows} == set(PRESETS)
    for name, cells in rows:
        policy = jaxamp.PrecisionPolicy.parse(name)
        words = [cell.strip().split(",")[0] for cell in cells.split("|")]
        assert words == [policy.precision_for(kind).short for kind in jaxamp.OpKind]
        assert ("f32 inside" in cells) == (policy.accumulation is not None and words[1] != "f32")


def test_the_version_is_where_the_build_looks_for_it():
    """One place has it, for the package and for whoever imports a bare checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    source = (ROOT / project["tool"]["hatch"]["version"]["path"]).read_text()
    assert project["project"]["dynamic"] == ["version"]
    assert re.search(r'^__version__ = "(.+?)"', source, re.MULTILINE)[1] == jaxamp.__version__


def test_the_front_door_is_small():
    """About twenty names of daily use, all in the reference; nothing else is offered."""
    assert len(jaxamp.__all__) <= 24
    assert set(dir(jaxamp)) == {*jaxamp.__all__, "__version__"}
    named = set(re.findall(r"\w+", (ROOT / "docs/reference/api.md").read_text()))
    assert set(jaxamp.__all__) <= named


def test_every_page_has_its_place_on_the_site():
    """The navigation names each page of docs/ once."""
    named = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(pages)


@pytest.mark.parametrize(
    "package", ["jaxamp/training", "jaxamp/kernels", "jaxamp/quantized/kernels"]
)
def test_every_public_name_is_in_the_reference(package):
    """States of optimizers apart, which are what ``init`` returns."""
    exported = re.findall(
        r" (\w+) as \1$", (ROOT / package / "__init__.py").read_text(), re.MULTILINE
    )
    page = (ROOT / "docs/reference/api.md").read_text()
    named = set(re.findall(r"\w+", page))
    assert len(exported) > 1
    assert [name for name in exported if name not in named and not name.endswith("State")] == []


PRESETS = (
    "always_f32",
    "always_f16",
    "mixed_f16_conservative",
    "mixed_f16",
    "mixed_bf16",
)


def test_every_guard_is_listed():
    """The table of guards has a row for each, and no other."""
    page = (ROOT / "docs/explanation/guards.md").read_text()
    table = page.partition("| guard | what it protects |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)
    assert sorted(rows) == sorted(guard.value for guard in jaxamp.Guard)


@pytest.mark.parametrize("extra", ["demo", "test", "dev"])
def test_make_installs_extras_that_exist(extra):
    """A stamp of the Makefile names an extra of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f".installed-{extra}" in MAKEFILE
    assert extra in project["optional-dependencies"]
