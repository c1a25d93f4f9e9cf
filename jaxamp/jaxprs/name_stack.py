"""Scope paths: the names that the user entered around an equation, without those that JAX adds.

An equation carries a name stack. JAX writes the names of transformations around the user's names,
adds names of its own, and repeats names where it differentiates a ``jax.checkpoint``. An equation
of an inner jaxpr carries only the names entered inside that jaxpr: those of the enclosing equations
are put before them. Functions are read from the call stack. What else is told of an equation is
written among its names as a mark, such as ``module[Net.blocks]`` and ``item[blocks.2]``.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from jax.extend.core import JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.core.keep_precision import MARKER
from jaxamp.jaxprs.nested import wiring

# What JAX itself writes around or between the names that the user entered.
_TRANSFORM = re.compile(r"(?:jvp|transpose|vmap)\(")
_OWN_NAMES = ("rematted_computation",)
_MARK = re.compile(r"(module|item|called)\[([^\]/]*)\]")  # the first two are a feature's
_OF_LAYERS = "eqx.nn."  # equinox names the class of a layer, inside of the modules around it
_REPEATED = re.compile(r"repeated\[(\d+)\]")  # how many names before it are there a second time


Path = tuple[str, ...]  # names of modules, outermost first


@functools.lru_cache(maxsize=4096)
def clean_scope(name_stack: str) -> str:
    """Return the scope path as the user wrote it: no transforms, markers or names of JAX's.

    >>> clean_scope("transpose(jvp(transformer))/jvp(layer3)/keep_precision[f32]/attention")
    'transformer/layer3/attention'
    """
    kept: list[str] = []
    paths: dict[str, Path] = {}
    for name in _without_transforms(name_stack).split("/"):
        if marker := _REPEATED.fullmatch(name):
            del kept[len(kept) - int(marker[1]) :]
        elif marker := _MARK.fullmatch(name):
            paths[marker[1]] = tuple(filter(None, marker[2].split(".")))
        elif name and name not in _OWN_NAMES and not MARKER.fullmatch(name):
            kept.append(name)
    inside = next((n for n, name in enumerate(kept) if name.startswith(_OF_LAYERS)), len(kept))
    modules = with_items(paths.get("module", ()), paths.get("item", ()))
    return "/".join([*kept[:inside], *modules, *kept[inside:]])


def is_backward(scope: str) -> bool:
    """Return whether an equation belongs to a backward pass, by JAX's names around it.

    >>> is_backward("transpose(jvp(net))/dense")
    True
    >>> is_backward("transpose(jvp())/rematted_computation")
    False
    """
    return "transpose(" in scope and not is_repeated(scope)


def is_repeated(scope: str) -> bool:
    """Return whether an equation recomputes part of a forward pass for a backward pass."""
    return "rematted_computation" in scope


def is_transposed(name_stack: str) -> bool:
    """Return whether a name stack is that of a backward pass, what it recomputes included.

    >>> is_transposed("transpose(jvp(head))"), is_transposed("jvp(head)")
    (True, False)
    """
    return "transpose(" in name_stack


def with_items(modules: Path, item: Path) -> Path:
    """Return a path with the indices that another has of its lists.

    >>> with_items(("Net", "blocks", "linear"), ("Net", "blocks", "2"))
    ('Net', 'blocks', '2', 'linear')
    """
    found, rest = list[str](), list(modules)
    for name in item:
        if rest and rest[0] == name:
            found.append(rest.pop(0))
        elif name.isdigit():
            found.append(name)
        else:
            return modules
    return (*found, *rest)


def joined_scope(outer: str, eqn: JaxprEqn) -> str:
    """Return the name stack of an equation, after that of the enclosing equations, `outer`."""
    return without_repeats(joined_names(outer, eqn), eqn)


def joined_names(outer: str, eqn: JaxprEqn) -> str:
    """Return the name stack of an equation after `outer`, repeated names included.

    One that holds jaxprs gets a mark with the functions that are called around it.
    """
    called = called_mark(eqn.source_info) if wiring(eqn) else ""
    return "/".join(filter(None, (outer, str(eqn.source_info.name_stack), called)))


def called_mark(source_info: Any) -> str:
    """Return a mark with the functions that are called around an equation, the user's first."""
    user, library = (",".join(names) for names in jax_compat.functions(source_info.traceback))
    return f"called[{user};{library}]" if user or library else ""


def functions_around(name_stack: str, eqn: JaxprEqn) -> tuple[str, ...]:
    """Return the user's functions around an equation, innermost first, and then JAX's own."""
    user, library = jax_compat.functions(eqn.source_info.traceback)
    for kind, text in reversed(_MARK.findall(name_stack)):
        if kind == "called":
            more_user, more_library = text.split(";")
            user, library = (*user, *more_user.split(",")), (*library, *more_library.split(","))
    return tuple(filter(None, (*user, *library)))


def without_repeats(name_stack: str, eqn: JaxprEqn) -> str:
    """Return the name stack of a higher-order equation, with a mark where names are repeated.

    Each time that JAX differentiates a ``jax.checkpoint``, it writes the names around it twice.
    """
    if not eqn.params.get("differentiated"):
        return name_stack
    names = clean_scope(_MARK.sub("", str(eqn.source_info.name_stack))).split("/")
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
