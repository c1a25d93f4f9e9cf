"""Imports go down only, as docs/architecture.md draws it; there is no circle of any kind."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.project.imports import Import, circles, graph, imports, modules

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "jaxamp"
PAGE = (ROOT / "docs/architecture.md").read_text()
MOST_FILES = 5  # in the package's root

# Folders that import upwards today. Take a pair out as soon as it is gone: a test says when.
UPWARDS: set[tuple[str, str]] = set()


def _floors() -> list[list[str]]:
    """The folders and files in the drawing's lines, top first."""
    (drawing,) = re.findall(r"Imports go down only:\n\n```\n(.*?)```", PAGE, re.DOTALL)
    lines = [
        re.findall(r"(?:^|(?<=  ))([\w/]+(?:\.py|/))(?=\s|$)", x) for x in drawing.splitlines()
    ]
    return [[name.rstrip("/") for name in line] for line in lines if line]


FLOORS = _floors()
FLOOR = {name: len(FLOORS) - row for row, line in enumerate(FLOORS) for name in line}
MODULES = modules(PACKAGE)


@functools.cache
def _imports() -> list[Import]:
    """Those of the package, found when a test asks: every worker imports this file."""
    return imports(PACKAGE)


def _place(module: str) -> str:
    """What the drawing calls a module's home: the file, or the innermost folder that it draws."""
    path = MODULES[module].relative_to(PACKAGE)
    names = (str(place) for place in (path, *path.parents))
    return next((name for name in names if name in FLOOR), str(path))


def _between_places() -> list[tuple[str, str, Import]]:
    pairs = ((_place(i.importer), _place(i.imported), i) for i in _imports())
    return [(above, below, i) for above, below, i in pairs if above != below]


def test_imports_go_down() -> None:
    """A module imports from its own folder or from folders on a lower line of the drawing."""
    wrong = [
        f"{found}: {above} is not above {below}"
        for above, below, found in _between_places()
        if FLOOR[above] <= FLOOR[below] and (above, below) not in UPWARDS
    ]
    assert wrong == []


def test_no_exception_outlives_its_need() -> None:
    """A pair of folders that may import upwards still does."""
    pairs = {(above, below) for above, below, _ in _between_places()}
    assert UPWARDS - pairs == set()


def test_there_is_no_circle() -> None:
    """No file leads back to itself, by imports at the top, inside functions or for types."""
    assert circles(graph(_imports())) == []


def test_the_drawing_is_complete() -> None:
    """Every folder and every file of the root has a floor, and every name drawn exists."""
    assert {_place(module) for module in MODULES} - set(FLOOR) == set()
    assert [name for name in FLOOR if not (PACKAGE / name).exists()] == []


def test_the_root_has_few_files() -> None:
    """Whatever has a subject is in that subject's folder."""
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_FILES


def test_a_file_name_means_one_thing() -> None:
    """No two files have one name, but `feature.py`."""
    named = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("__init__.py", "feature.py"):
            named[path.name].append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in named.items() if len(paths) > 1} == {}


SUBJECTS = {
    "conformance", "ecosystem", "faults", "fields", "fields/programs", "meshes", "models",
    "numerics/hostile", "placement", "programs", "project", "public",
}  # fmt: skip
"""Folders of tests that are about the whole."""
ANYWHERE = {"test_deviceless.py", "test_errors.py", "test_techniques.py"}
"""Compilers and errors concern every folder; techniques are words of `policy` and work in `xla`."""


def stray_tests(tests: Path, package: Path) -> list[str]:
    """Folders that the package lacks, and tests named as a module that lie elsewhere."""
    homes = defaultdict(set)
    for path in package.rglob("*.py"):
        homes[f"test_{path.name}"].update(path.parents)
    strays = []
    for path in sorted(tests.rglob("*.py")):
        folder = path.parent.relative_to(tests)
        if str(folder) in SUBJECTS:
            continue
        known = homes.get(path.name)
        homeless = known is not None and package / folder not in known
        if not (package / folder).is_dir() or (homeless and path.name not in ANYWHERE):
            strays.append(str(path.relative_to(tests)))
    return strays


def test_tests_mirror_the_package() -> None:
    """A test is in the folder of what it tests, or in one above it, or in that of a subject."""
    assert stray_tests(ROOT / "tests", PACKAGE) == []


def test_a_stray_test_is_found(tmp_path: Path) -> None:
    """One in the folder of another module, and one in a folder that the package has not."""
    for name in ("package/a/one.py", "package/b/two.py", "tests/a/test_one.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert stray_tests(tmp_path / "tests", tmp_path / "package") == []
    (tmp_path / "tests/a/test_two.py").touch()
    (tmp_path / "tests/c").mkdir()
    (tmp_path / "tests/c/test_three.py").touch()
    strays = stray_tests(tmp_path / "tests", tmp_path / "package")
    assert strays == ["a/test_two.py", "c/test_three.py"]


DOORS = "core/jax_compat", "kernels/jax_compat"


def test_private_jax_is_behind_doors() -> None:
    """The folders `jax_compat`, of the core and of kernels, alone name `jax._src`."""
    users = {
        str(path.relative_to(PACKAGE))
        for path in MODULES.values()
        if "_src" in (text := path.read_text()) and any(map(_is_private, ast.walk(ast.parse(text))))
    }
    assert users
    assert {user for user in users if not user.startswith(DOORS)} == set()


def _is_private(node: ast.AST) -> bool:
    """Whether it imports from `jax._src`, or reads it as an attribute or from a string."""
    if isinstance(node, ast.Import):
        return any(alias.name.startswith("jax._src") for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").startswith("jax._src")
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.startswith("jax._src.")
    return isinstance(node, ast.Attribute) and node.attr == "_src"


CIRCLES = {
    "top": ("from planted.b import y\n", "from planted.a import x\n"),
    "lazy": ("def f():\n    from planted.b import y\n", "import planted.a\n"),
    "types": (
        "from planted.b import y\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from planted.a import x\n",
    ),
    "relative": ("from .b import y\n", "from . import a\n"),
    "by name": ("from planted.b import y\n", "def f():\n    import_module('planted.a')\n"),
    "table": ("from planted.b import y\n", "TABLE = {'equinox': 'planted.a:wrap'}\n"),
}


@pytest.mark.parametrize("kind", CIRCLES)
def test_a_planted_circle_is_found(kind: str, tmp_path: Path) -> None:
    """Two files that import each other, one of them in a way that runs late or never."""
    package = tmp_path / "planted"
    package.mkdir()
    for name, text in zip(("a", "b"), CIRCLES[kind], strict=True):
        (package / f"{name}.py").write_text(text)
    (package / "__init__.py").write_text("")
    (package / "c.py").write_text("from planted import a, b\n")  # above both, in no circle
    assert circles(graph(imports(package))) == [["planted.a", "planted.b"]]
