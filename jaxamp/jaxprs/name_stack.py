"""Scope paths: the names that the user entered around an equation, without those that JAX adds.

An equation carries a name stack. JAX writes the names of transformations around the user's names,
adds names of its own, and repeats names where it differentiates a ``jax.checkpoint``. An equation
of an inner jaxpr carries only the names entered inside that jaxpr: those of the enclosing equations
are put before them. Modules that name no scope are read from the call stack.
"""

from __future__ import annotations

import functools
import re

from jax.extend.core import JaxprEqn

from jaxamp.core.keep_precision import MARKER
from jaxamp.jaxprs.module_paths import module_path, with_items

# What JAX itself writes around or between the names that the user entered.
_TRANSFORM = re.compile(r"(?:jvp|transpose|vmap)\(")
_OWN_NAMES = ("rematted_computation",)
_MODULES = re.compile(r"module\[([^\]/]*)\]")
_ITEM = re.compile(r"item\[([^\]/]*)\]")  # see list_items.py
_OF_LAYERS = "eqx.nn."  # equinox names the class of a layer, inside of the modules around it
_REPEATED = re.compile(r"repeated\[(\d+)\]")  # how many names before it are there a second time


@functools.lru_cache(maxsize=4096)
def clean_scope(name_stack: str) -> str:
    """Return the scope path as the user wrote it: no transforms, markers or names of JAX's.

    Args:
      name_stack: ``str(eqn.source_info.name_stack)``, with that of the enclosing equations before
        it.

    >>> clean_scope("transpose(jvp(transformer))/jvp(layer3)/keep_precision[f32]/attention")
    'transformer/layer3/attention'
    """
    kept: list[str] = []
    modules, item = (), ()
    for name in _without_transforms(name_stack).split("/"):
        if marker := _REPEATED.fullmatch(name):
            del kept[len(kept) - int(marker[1]) :]
        elif marker := _MODULES.fullmatch(name):
            modules = tuple(marker[1].split("."))
        elif marker := _ITEM.fullmatch(name):
            item = tuple(marker[1].split("."))
        elif name and name not in _OWN_NAMES and not MARKER.fullmatch(name):
            kept.append(name)
    inside = next((n for n, name in enumerate(kept) if name.startswith(_OF_LAYERS)), len(kept))
    return "/".join([*kept[:inside], *with_items(modules, item), *kept[inside:]])


def joined_scope(outer: str, eqn: JaxprEqn) -> str:
    """Return the name stack of an equation, after that of the enclosing equations, `outer`."""
    return without_repeats(joined_names(outer, eqn, module_path(eqn.source_info)), eqn)


def joined_names(outer: str, eqn: JaxprEqn, modules: str) -> str:
    """Return the name stack of an equation after `outer`, and a mark with its module path.

    A function that is jitted is traced once: where it is called again, its equations still have the
    modules of the first call. They do not go on from those of the equation around, which counts.

    Args:
      outer: name stack of the enclosing equations.
      eqn: the equation.
      modules: the modules that are called around it, as ``module_path`` has them.
    """
    around = _MODULES.findall(outer)[-1:]
    goes_on = not around or f"{modules}.".startswith(f"{around[0]}.")
    mark = f"module[{modules}]" if modules and goes_on else ""
    return "/".join(filter(None, (outer, str(eqn.source_info.name_stack), mark)))


def without_repeats(name_stack: str, eqn: JaxprEqn) -> str:
    """Return the name stack of a higher-order equation, with a mark where names are repeated.

    Each time that JAX differentiates a ``jax.checkpoint``, it writes the names around it twice.

    Args:
      name_stack: that of the equation, with those of the enclosing ones before it.
      eqn: the equation.
    """
    if not eqn.params.get("differentiated"):
        return name_stack
    names = clean_scope(str(eqn.source_info.name_stack)).split("/")
    once = names
    for _ in range(name_stack.count("transpose(")):
        half = len(once) // 2
        if once[:half] != once[half:]:
            break
        once = once[:half]
    return f"{name_stack}/repeated[{len(names) - len(once)}]"


def _without_transforms(text: str) -> str:
    """Remove ``jvp(`` and the like with their closing bracket; the user's brackets stay."""
    kept: list[str] = []
    wrappers: list[bool] = []  # one entry per open bracket: does it belong to a transform?
    at, starts_name = 0, True
    while at < len(text):
        if starts_name and (wrapper := _TRANSFORM.match(text, at)):
            wrappers.append(True)
            at = wrapper.end()
            continue
        char = text[at]
        if char == "(":
            wrappers.append(False)
        if not (char == ")" and wrappers and wrappers.pop()):
            kept.append(char)
        at, starts_name = at + 1, char == "/"
    return "".join(kept)
