"""Which primitives the installed JAX registers; run as a module, it prints them as JSON.

Run it in a process of its own: it imports all of JAX, experimental parts and kernels included.
"""

import contextlib
import gc
import importlib
import inspect
import json
import pkgutil
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import Primitive


def import_everything() -> list[str]:
    """Import each module of JAX; those that want another package or a GPU are returned."""
    refused: list[str] = []
    for module in pkgutil.walk_packages(jax.__path__, "jax.", onerror=lambda name: None):
        try:
            importlib.import_module(module.name)
        except Exception as error:
            refused.append(f"{module.name}: {error}")
    return refused


def homes() -> dict[int, str]:
    """The global name of each primitive that has one, by object id.

    Many modules pass a primitive on; the private, most deeply nested one defines it.
    """
    found: dict[int, tuple[bool, int, str]] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == "jax":
            for name, value in list(vars(module).items()):
                if isinstance(value, Primitive):
                    depth = module_name.count(".")
                    home = ("._src." in module_name, depth, f"{module_name}.{name}")
                    found[id(value)] = max(home, found.get(id(value), home))
    return {key: home for key, (*_, home) in found.items()}


def census() -> dict[str, list[str]]:
    """Where each primitive that lives in this process is defined, by primitive name."""
    home = homes()
    names: dict[str, list[str]] = {}
    for value in gc.get_objects():
        if isinstance(value, Primitive):
            where = home.get(id(value), f"no module (a {type(value).__qualname__})")
            names.setdefault(value.name, []).append(where)
    return {name: sorted(names[name]) for name in sorted(names)}


_JAXPR = re.compile(r"(?!num_)(\w*jaxprs?(_\w+)?|branches|callee|call)")


def carriers() -> dict[str, list[str]]:
    """Parameters that hold jaxprs, by primitive name, read off the signatures of JAX's rules."""
    names: dict[str, set[str]] = {}
    for value in gc.get_objects():
        if isinstance(value, Primitive):
            found = {name for rule in _rules(value) for name in _arguments(rule)}
            names.setdefault(value.name, set()).update(filter(_JAXPR.fullmatch, found))
    return {name: sorted(names[name]) for name in sorted(names) if names[name]}


def _rules(primitive: Primitive) -> Iterator[Any]:
    """What implements a primitive, as far as the signature names its parameters."""
    from jax._src.interpreters import ad, mlir, partial_eval

    yield from (primitive.impl, primitive.abstract_eval)
    lowerings = (mlir._lowerings, *mlir._platform_specific_lowerings.values())
    tables = (ad.primitive_jvps, ad.primitive_transposes, partial_eval.dce_rules)
    for table in (*lowerings, *tables):
        if primitive in table:
            yield getattr(table[primitive], "rule", table[primitive])


def _arguments(rule: Any, deeper: int = 4) -> set[str]:
    """Names of a function's arguments, and of those of the functions that it wraps."""
    try:
        names = set(inspect.signature(rule).parameters)
    except (TypeError, ValueError):
        names = set()
    for cell in getattr(rule, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # nothing is in the cell yet
            if deeper and callable(cell.cell_contents):
                names |= _arguments(cell.cell_contents, deeper - 1)
    return names


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    refused = import_everything()
    found = {"refused": refused, "primitives": census(), "carriers": carriers()}
    json.dump(found, sys.stdout)
