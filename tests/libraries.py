"""Skip, and do not stop at, test modules whose libraries cannot be imported here.

Tests import flax, haliax, numpyro and others at the top, as users do. One that is missing, or that
raises when it is imported beside this JAX, costs the modules that need it and no other; one that
asks JAX for a name that this JAX lacks, the tests that call it. What jaxamp itself depends on is
not forgiven: without it there is nothing to test.
"""

from __future__ import annotations

import doctest
import re
import sys
import tomllib
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def _required() -> set[str]:
    """Top-level names of jaxamp's own dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.match(r"[\w-]+", line) for line in project["dependencies"]]
    return {name[0].replace("-", "_") for name in names if name}


FORGIVEN_NEVER = _required() | sys.stdlib_module_names | {"jaxlib", "pytest"}


def broken_library(error: BaseException) -> str | None:
    """Name the library whose import raised `error`, None where the error is another one."""
    while isinstance(error, pytest.Collector.CollectError) and error.__cause__ is not None:
        error = error.__cause__
    name = next(_imported_by_us(error), None)
    if name is None and isinstance(error, ImportError):  # not found, or a name that it lacks
        name = error.name
    if name is None and isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        name = error.obj.__name__  # a name again, read as an attribute
    library = (name or "").partition(".")[0]
    is_ours = (ROOT / library).is_dir()  # the root itself for no name
    return None if is_ours or library in FORGIVEN_NEVER else library


def _imported_by_us(error: BaseException) -> Iterator[str]:
    """Yield the module that the last of our own frames was importing, if it raised `error`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = [i for i, frame in enumerate(frames) if _is_ours(Path(frame.f_code.co_filename))]
    for frame in frames[ours[-1] + 1 :] if ours else []:
        if frame.f_code.co_name == "<module>":
            yield frame.f_globals["__name__"]
        elif not frame.f_code.co_filename.startswith("<frozen importlib"):
            return  # we called it: that is no failure of an import


def _is_ours(path: Path) -> bool:
    return path.is_relative_to(ROOT) and "site-packages" not in path.parts


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Turn the failure of a library into a skipped module, with the reason in words."""
    report = yield
    call = getattr(report, "call", None)  # pytest's own; taken away so that no debugger starts
    error = call.excinfo.value if report.failed and call and call.excinfo else None
    library = broken_library(error) if error is not None else None
    if library is not None:
        words = f"Skipped: {library} cannot be imported here: {_first_line(error)}"
        report.outcome, report.longrepr = "skipped", (str(collector.path), 1, words)
        del report.call
    return report


def asked_in_vain(error: BaseException) -> str | None:
    """Name the library that asked JAX for a name that it lacks, None where we or nobody did."""
    if not (isinstance(error, AttributeError) and isinstance(error.obj, ModuleType)):
        return None
    if error.obj.__name__.partition(".")[0] != "jax":
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [frame.f_globals.get("__name__", "").partition(".")[0] for frame in frames]
    asked = [frame for frame, name in zip(frames, names, strict=True) if name != "jax"][-1]
    library = asked.f_globals.get("__name__", "").partition(".")[0]
    return None if _is_ours(Path(asked.f_code.co_filename)) or library == "pytest" else library


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Turn the failure of a library that this JAX has left behind into a skip, in words."""
    report = yield
    error = call.excinfo.value if report.failed and call.excinfo else None
    if isinstance(error, doctest.UnexpectedException):
        error = error.exc_info[1]
    library = asked_in_vain(error) if error is not None else None
    if library is not None:
        words = f"Skipped: {library} does not run on this JAX: {_first_line(error)}"
        report.outcome, report.longrepr = "skipped", (str(item.path), 1, words)
    return report


def _first_line(error: BaseException) -> str:
    while isinstance(error, pytest.Collector.CollectError) and error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
