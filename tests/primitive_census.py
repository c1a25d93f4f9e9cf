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
    """Import each module of JAX; the ones that want another package or a GPU are returned."""
    refused = []
    for module in pkgutil.walk_packages(jax.__path__, "jax.", onerror=refused.append):
        try:
            importlib.import_module(module.name)
        except Exception as error:
            refused.append(f"{module.name}: {error}")
    return refused


def homes() -> dict[int, str]:
    """Where the primitives that are module globals are defined, by object id."""
    found: dict[int, str] = {}
    for module_name, module in sorted(sys.modules.items()):
        if module_name == "jax" or module_name.startswith("jax."):
            for name, value in list(vars(module).items()):
                if isinstance(value, Primitive):
                    where = f"{module_name}.{name}"
                    # The defining module is named before the public ones that pass it on.
                    if "_src" in where or id(value) not in found:
                        found.setdefault(id(value), where)
    return found


def census() -> dict[str, list[str]]:
    """The places of definition of each primitive alive in this process, by primitive name."""
    where = homes()
    names: dict[str, list[str]] = {}
    for value in gc.get_objects():
        if isinstance(value, Primitive):
            place = where.get(id(value), f"a {type(value).__qualname__} in no module")
            names.setdefault(value.name, []).append(place)
    return {name: sorted(names[name]) for name in sorted(names)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    refused = import_everything()
    json.dump({"primitives": census(), "refused": refused}, sys.stdout)
