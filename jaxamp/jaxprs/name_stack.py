"""Scope paths: the names that the user entered around an equation, freed of what JAX adds.

An equation carries a name stack. JAX writes the names of transformations around the user's names,
adds names of its own, and repeats names where it differentiates a ``jax.checkpoint``. An equation
of an inner jaxpr carries only the names entered inside that jaxpr: those of the equations around it
are put before them.
"""

from __future__ import annotations

import functools
import re

from jax.extend.core import JaxprEqn

from jaxamp.core.keep_precision import MARKER

# What JAX itself writes around or between the names that the user entered.
_TRANSFORM = re.compile(r"(?:jvp|transpose|vmap)\(")
_OWN_NAMES = ("rematted_computation",)
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
    for name in _without_transforms(name_stack).split("/"):
        if marker := _REPEATED.fullmatch(name):
            del kept[len(kept) - int(marker[1]) :]
        elif name and name not in _OWN_NAMES and not MARKER.fullmatch(name):
            kept.append(name)
    return "/".join(kept)


def joined_scope(outer: str, eqn: JaxprEqn) -> str:
    """Return the name stack of an equation, after that of the enclosing equations, `outer`."""
    names = "/".join(filter(None, (outer, str(eqn.source_info.name_stack))))
    return without_repeats(names, eqn)


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
