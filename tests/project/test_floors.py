"""Imports go down only, as docs/architecture.md draws it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "jaxamp"
PAGE = (ROOT / "docs/architecture.md").read_text()


def _floors() -> list[list[str]]:
    """The names of modules and packages in the drawing's lines, top first."""
    (drawing,) = re.findall(r"Imports go down only:\n\n```\n(.*?)```", PAGE, re.DOTALL)
    names = [re.findall(r"\b\w+(?:\.py|/)", line) for line in drawing.splitlines()]
    return [[name.removesuffix(".py").rstrip("/") for name in line] for line in names]


FLOORS = _floors()
FLOOR = {name: len(FLOORS) - row for row, line in enumerate(FLOORS) for name in line}
MODULES = sorted(PACKAGE.rglob("*.py"))


def _part(module: str) -> str:
    """What the drawing calls a module: its package, or itself at the top level."""
    return module.split(".")[1] if "." in module else "__init__"


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """jaxamp's modules that a file imports when it is imported itself, and the lines."""
    tree = ast.parse(path.read_text())
    for node in tree.body:  # not those inside functions, which wait until they are needed
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxamp"):
            whole = [f"jaxamp.{a.name}" for a in node.names] if node.module == "jaxamp" else []
            yield from ((name, node.lineno) for name in whole or [node.module or ""])
        elif isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names if a.name.startswith("jaxamp."))


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    """A module imports from its own floor or from below it."""
    own = _part(_name(path))
    if own == "__init__":  # the package itself hands out what is in it
        return
    for module, line in _imports(path):
        other = _part(module)
        assert FLOOR[own] >= FLOOR[other], f"{path.name}:{line}: {own} is below {other}"


def test_the_drawing_is_complete() -> None:
    """Every module and package at the top level has a floor, and every name drawn exists."""
    there = {_part(_name(path)) for path in MODULES} - {"__init__"}
    assert there - set(FLOOR) == set()
    assert set(FLOOR) - there == set()


def test_private_jax_is_behind_one_door() -> None:
    """`core/jax_compat/` alone imports from `jax._src`."""
    private = re.compile(r"^\s*(from|import) jax\._src", re.M)
    users = {p.parent.name for p in MODULES if private.search(p.read_text())}
    assert users == {"jax_compat"}
