"""Name stacks of equations: scopes and transformations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from jax._src import source_info_util as _source_info_util
from jax.extend.core import JaxprEqn

_Scope = _source_info_util.Scope


class CommonNames(NamedTuple):
    """Names that the name stacks of all equations of a group begin with.

    Attributes:
      entries: how many entries of their name stacks are the same, from the outermost on.
      scopes: how many names are the same after those, once transformations are left aside: what
        `jvp(layer/norm)` and `transpose(jvp(layer/norm))` have in common.
    """

    entries: int = 0
    scopes: int = 0


def common_names(eqns: Sequence[JaxprEqn]) -> CommonNames:
    """Return the name stack entries that all of `eqns` have in common."""
    stacks = [
        *{id(e.source_info.name_stack): e.source_info.name_stack.stack for e in eqns}.values()
    ]
    entries = _common(stacks)
    return CommonNames(entries, _common([_parted(stack[entries:])[1] for stack in stacks]))


def _common(stacks: Sequence[tuple[Any, ...]]) -> int:
    """Return the length of the common prefix of `stacks`."""
    return sum(
        1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*stacks, strict=False))
    )


def _parted(stack: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split a name stack into its leading transformations and the rest."""
    first = next((n for n, entry in enumerate(stack) if isinstance(entry, _Scope)), len(stack))
    return stack[:first], stack[first:]


def _within(stack: tuple[Any, ...], common: CommonNames) -> tuple[Any, ...]:
    """Return a name stack without the entries of `common`."""
    stack = stack[common.entries :]
    if not common.scopes:
        return stack
    transforms, names = _parted(stack)
    return transforms + names[common.scopes :]


def keep_common_names(eqn: JaxprEqn, common: CommonNames) -> JaxprEqn:
    """Return an equation whose name stack has the entries of `common` only."""
    stack = eqn.source_info.name_stack.stack
    _, names = _parted(stack[common.entries :])
    return _named(eqn, stack[: common.entries] + names[: common.scopes])


def drop_common_names(eqn: JaxprEqn, common: CommonNames) -> JaxprEqn:
    """Return an equation whose name stack lacks the entries of `common`."""
    return _named(eqn, _within(eqn.source_info.name_stack.stack, common))


def _named(eqn: JaxprEqn, stack: tuple[Any, ...]) -> JaxprEqn:
    info = eqn.source_info
    if stack == info.name_stack.stack:
        return eqn
    return eqn.replace(source_info=info.replace(name_stack=type(info.name_stack)(stack)))


def with_scope(name_stack: Any, name: str) -> Any:
    """Return a name stack with one more name, around its others and within transformations."""
    transforms, names = _parted(name_stack.stack)
    return type(name_stack)((*transforms, _Scope(name), *names))


def origin(eqn: JaxprEqn, common: CommonNames) -> tuple[Any, ...]:
    """Return an equation's traceback, its name stack without `common`, and its context."""
    info = eqn.source_info
    return info.traceback, _within(info.name_stack.stack, common), eqn.ctx
