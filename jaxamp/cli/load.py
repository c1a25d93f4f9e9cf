"""Loading of functions, from modules or files, and of policies that a command line names."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxamp.errors import InspectionError, accepted
from jaxamp.policy.policy import PrecisionPolicy

_REFERENCE = re.compile(r"[\w./\\-]+:[A-Za-z_][\w.]*")


def is_reference(text: str) -> bool:
    """Return whether a text is ``package.module:function`` or ``file.py:function``.

    >>> is_reference("models.vit:loss"), is_reference("{'w': f32[2]}")
    (True, False)
    """
    return bool(_REFERENCE.fullmatch(text.strip()))


def load(reference: str) -> Any:
    """Return the callable that a reference names.

    >>> load("jax.numpy:dot").__name__
    'dot'
    """
    if not is_reference(reference):
        raise InspectionError(
            f"{reference!r} names no function. Write package.module:function or "
            "path/to/file.py:function."
        )
    where, _, path = reference.strip().rpartition(":")
    found: Any = _file(Path(where)) if where.endswith(".py") else _module(where)
    for name in path.split("."):
        if not hasattr(found, name):
            public = [n for n, value in vars(found).items() if callable(value) and n[0] != "_"]
            raise InspectionError(f"{where} has no {name!r}. {accepted(name, public)}")
        found = getattr(found, name)
    if not callable(found):
        raise InspectionError(f"{reference} is {type(found).__name__}, and cannot be called.")
    return found


def load_policy(text: str) -> PrecisionPolicy:
    """Return a policy: what ``amp`` accepts as a word, or a file that ``to_json`` wrote."""
    if not text.endswith(".json"):
        return PrecisionPolicy.parse(text)
    path = Path(text)
    if not path.is_file():
        raise InspectionError(f"There is no file {text}.")
    return PrecisionPolicy.from_json(path.read_text())


def _module(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # the module is there, and what it imports is not
        raise InspectionError(
            f"There is no module {error.name!r} in {Path.cwd()} or among the installed packages. "
            "Start the command where `import` finds it, or name a file: path/to/file.py:function."
        ) from None


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InspectionError(f"There is no file {path}.")
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # what lies beside it is imported as `python file.py` would
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
