"""Every import inside of a package: at the top of a file, inside functions, for type checkers."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    """One module imports another, somewhere in its text."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def modules(package: Path) -> dict[str, Path]:
    """The files of a package by the names of their modules."""
    return {_name(path, package): path for path in sorted(package.rglob("*.py"))}


def imports(package: Path) -> list[Import]:
    """Every import of one module of a package by another, lazy and type-checking ones included.

    A string that names a module counts: ``import_module`` and tables of adapters take such.
    """
    known = modules(package)
    return [
        Import(name, imported, line)
        for name, path in known.items()
        for imported, line in _imported(name, path, known)
        if imported != name
    ]


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of nodes that lead back to themselves, each sorted."""
    reached = {node: _reached(node, edges) for node in edges}
    found = {tuple(sorted(b for b in reached[a] if a in reached.get(b, ()))) for a in edges}
    return [list(circle) for circle in sorted(found) if circle]


def graph(found: list[Import]) -> dict[str, set[str]]:
    """The modules that each module imports."""
    edges: dict[str, set[str]] = {}
    for each in found:
        edges.setdefault(each.importer, set()).add(each.imported)
    return edges


def _name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def _reached(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    """The nodes that one gets to from a node by at least one step."""
    seen: set[str] = set()
    waiting = [*edges.get(start, ())]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += edges.get(node, ())
    return seen


def _imported(name: str, path: Path, known: Mapping[str, Path]) -> Iterator[tuple[str, int]]:
    folder = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) + 1 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            # `from package import module` imports the module, `from module import name` its home.
            inner = [f"{base}.{alias.name}" for alias in node.names]
            found = [module if module in known else base for module in inner]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [node.value.partition(":")[0]] if "." in node.value else []
        else:
            continue
        yield from ((module, node.lineno) for module in found if module in known)
