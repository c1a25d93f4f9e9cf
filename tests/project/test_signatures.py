"""The public names keep their signatures, and errors their classes, until somebody means otherwise.

    python -m tests.project.test_signatures

writes the file anew after a change that is meant; docs/stability.md says what it promises.
"""

import difflib
import enum
import importlib
import inspect
from pathlib import Path

FILE = Path(__file__).parent / "public_signatures.txt"
MODULES = (
    "jaxamp",
    "jaxamp.training",
    "jaxamp.errors",
    "jaxamp.kernels",
    "jaxamp.quantized.kernels",
)


def public(module):
    """What a module exports: its `__all__`, or its own names that begin with no underscore."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and str(getattr(value, "__module__", "")).startswith("jaxamp")
        and (module.__name__ != "jaxamp.errors" or inspect.isclass(value))
    ]
    found = {name: getattr(module, name) for name in sorted(names)}
    return {name: value for name, value in found.items() if not inspect.ismodule(value)}


def parameters(value):
    """Names, kinds and defaults; types are left to the type checker."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    shown = [p if _is_plain(p.default) else p.replace(default=Ellipsis) for p in bare]
    return str(inspect.Signature(shown))


def _is_plain(default):
    return default in (None, ()) or isinstance(default, str | int | float | type)


def lines():
    """A line for each function, class and member."""
    for name in MODULES:
        module = importlib.import_module(name)
        for public_name, value in public(module).items():
            path = f"{name}.{public_name}"
            if inspect.isclass(value) and issubclass(value, Exception):
                yield f"class {path}({', '.join(base.__name__ for base in value.__bases__)})"
                continue
            if inspect.isclass(value) and issubclass(value, enum.Enum):
                yield f"{path}: {', '.join(value.__members__)}"  # its signature is Python's
            else:
                yield f"{path}{parameters(value)}"
            if inspect.isclass(value):
                ours = [base for base in value.__mro__ if base.__module__.startswith("jaxamp")]
                for member in sorted({name for base in ours for name in vars(base)}):
                    of = inspect.getattr_static(value, member)
                    if not member.startswith("_") and callable(getattr(value, member, None)):
                        of = getattr(of, "__func__", of)
                        yield f"{path}.{member}{parameters(of)}"


def test_public_signatures_are_those_that_were_promised():
    """A change is shown line by line; one that is meant is written into the file."""
    changes = [*difflib.unified_diff(FILE.read_text().splitlines(), [*lines()], lineterm="", n=0)]
    assert changes == [], "python -m tests.project.test_signatures writes the file anew"


def test_every_error_says_where_it_belongs():
    """All are JaxAmpError, and what Python or JAX raise in such a case."""
    errors = [line for line in FILE.read_text().splitlines() if "Error(" in line]
    assert len(errors) > 10
    assert all(
        "JaxAmpError" in line
        or "_EquationError" in line
        or "Policy" in line
        or "(Exception)" in line
        for line in errors
    )


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n")
