"""Which primitives the installed JAX registers; run as a module, it prints them as JSON.

Run it in a process of its own: it imports all of JAX, experimental parts and kernels included.
"""

import gc
import importlib
import json
import pkgutil
import sys
import warnings

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


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    json.dump({"refused": import_everything(), "primitives": census()}, sys.stdout)
