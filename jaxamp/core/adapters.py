"""Adapters for other libraries' objects, used only in programs that import the library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

_LOADERS: dict[str, Callable[[], ModuleType]] = {}


def register_adapter(library: str, load: Callable[[], ModuleType]) -> None:
    """Register what imports the adapter of a library, by the library's module."""
    _LOADERS[library] = load


def adapter(library: str) -> ModuleType | None:
    """Return the adapter of a library; ``None`` where the program has not imported the library."""
    return _LOADERS[library]() if library in sys.modules and library in _LOADERS else None
