"""Name the items of lists of modules that a Python loop goes through: ``blocks.2`` of ``blocks``.

The call stack of an equation is the same for every item. But parameters have names in a program's
arguments, such as ``net.blocks[2].linear.kernel``: an equation that reads one belongs to that item,
and so do those beside it, as far as the code only goes forward, or back in a backward pass. There
an equation also belongs to the item whose values it reads at the same place in the code. What no
item is known of keeps the name of the list.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from jaxamp.core import jax_compat
from jaxamp.jaxprs.module_paths import Path, modules_of, shown_calls, with_items
from jaxamp.jaxprs.nested import Wiring, nested, wiring, with_nested

_ITEM = r"\b{}'?\]?\[(\d+)\]"  # of `net.blocks[2].scale` or `['blocks'][2]['scale']`
_ITEMS = re.compile(_ITEM.format(r"(\w+)"))
Names = tuple[str | None, ...]  # of the inputs of a jaxpr
Frames = tuple[tuple[int, int], ...]  # code and instruction
Place = tuple[int, ...]  # the instructions that the frames inside an item are at


def name_items(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a program whose name stacks have the items of lists of modules, as ``item[...]``.

    Args:
      closed: the program, with the names of its arguments.

    Returns:
      The same equations; the same object where no item is known.
    """
    names = tuple(closed.jaxpr.debug_info.arg_names or ())
    lists = frozenset(found for name in names for found, _ in _ITEMS.findall(name or ""))
    if not lists or len(names) != len(closed.jaxpr.invars):
        return closed
    jaxpr = _Namer(lists).of(closed.jaxpr, names, ())
    return closed if jaxpr is closed.jaxpr else closed.replace(jaxpr=jaxpr)


class _Site:
    """An equation, the names of parameters that it reads, and the item that it belongs to."""

    def __init__(
        self,
        eqn: JaxprEqn,
        named: dict[Any, str],
        around: Path,
        known: dict[Frames, tuple[tuple[str, int], ...]],
    ) -> None:
        self.eqn, self.item = eqn, around
        calls = shown_calls(eqn.source_info)
        self.frames = tuple([(id(code), at) for code, at in calls])  # codes themselves hash slowly
        if self.frames not in known:
            known[self.frames] = modules_of(calls)
        self.modules = known[self.frames]
        self.path = tuple(name for name, _ in self.modules)
        self.backward = "transpose(" in str(eqn.source_info.name_stack)
        operands = [v for v in eqn.invars if isinstance(v, Var)]
        self.names = frozenset(named[v] for v in operands if v in named)
        if len(operands) == 1 and self.names:  # moved, cast or scaled
            named.update(dict.fromkeys(eqn.outvars, *self.names))
        self.values = [(self.frames, v) for v in (*operands, *eqn.outvars)]

    def list_at(self, depth: int) -> Path:
        """Return the path of a list so many modules inside, empty if its item is known."""
        if depth + 1 < len(self.path) and self.path[depth + 1].isdigit():
            return ()  # the source has the index
        path = with_items(self.path[: depth + 1], self.item)
        return path if depth < len(self.path) and not path[-1].isdigit() else ()


class _Namer:
    """Writer of items into name stacks; a jaxpr whose inputs have the same names is one again."""

    def __init__(self, lists: Collection[str]) -> None:
        self.lists = lists
        self._known: dict[Frames, tuple[tuple[str, int], ...]] = {}  # the modules of frames
        self._stacks: dict[Any, tuple[Any, Any]] = {}  # equal ones stay one object
        self._closed: dict[Any, ClosedJaxpr] = {}
        self._made: dict[Any, tuple[Jaxpr, Jaxpr]] = {}  # the one before too, so that it lives

    def of(self, jaxpr: Jaxpr, names: Names, around: Path) -> Jaxpr:
        """Return a jaxpr with items in its name stacks.

        Args:
          jaxpr: the jaxpr.
          names: those of its inputs.
          around: the item that it belongs to.
        """
        if not any(names):
            return jaxpr
        key = id(jaxpr), names, around
        if key not in self._made:
            self._made[key] = jaxpr, self._of(jaxpr, names, around)
        return self._made[key][1]

    def _of(self, jaxpr: Jaxpr, names: Names, around: Path) -> Jaxpr:
        named = {v: name for v, name in zip(jaxpr.invars, names, strict=True) if name}
        sites = [_Site(eqn, named, around, self._known) for eqn in jaxpr.eqns]
        for depth in range(max((len(site.path) for site in sites), default=0)):
            self._find_items(sites, depth)
        eqns = [self._written(site, named, around) for site in sites]
        is_same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
        return jaxpr if is_same else jaxpr.replace(eqns=eqns)

    def _find_items(self, sites: Iterable[_Site], depth: int) -> None:
        """Find the items of lists so many modules inside, those of forward passes first."""
        groups: dict[Any, list[_Site]] = defaultdict(list)
        for site in sites:
            path = site.list_at(depth)
            if path and path[-1] in self.lists:
                frame = site.modules[depth][1]
                groups[site.backward, path, frame, site.frames[:frame]].append(site)
        read: dict[Any, set[str]] = defaultdict(set)  # what each item reads and makes, and where
        for (backward, path, frame, _), members in sorted(groups.items(), key=lambda g: g[0][0]):
            known = [_index(site.names, path) for site in members]
            if backward:
                votes = (_one(chain(*(read[path, v] for v in s.values))) for s in members)
                known = [index or vote for index, vote in zip(known, votes, strict=True)]
            places = [tuple(at for _, at in site.frames[frame:]) for site in members]
            for site, index in zip(members, _spread(known, places, backward), strict=True):
                if index is not None:
                    site.item = (*path, index)
                    for value in site.values:
                        read[path, value].add(index)

    def _written(self, site: _Site, named: dict[Any, str], around: Path) -> JaxprEqn:
        """Return an equation with its item, and with items in its jaxprs."""
        eqn = site.eqn
        if site.item != around:
            eqn = eqn.replace(source_info=self._scoped(eqn.source_info, site.item))
        bodies = nested(eqn)
        changed = [self._body(body, _handed(eqn, body, named), site.item) for body in bodies]
        if all(new is old for new, old in zip(changed, bodies, strict=True)):
            return eqn
        return eqn.replace(params={**eqn.params, **with_nested(eqn, changed)})

    def _scoped(self, source_info: Any, item: Path) -> Any:
        stack = source_info.name_stack
        key = id(stack), item
        if key not in self._stacks:
            scope = f"item[{'.'.join(item)}]"
            self._stacks[key] = stack, jax_compat.with_scope(stack, scope)
        return source_info.replace(name_stack=self._stacks[key][1])

    def _body(self, body: ClosedJaxpr, names: Names, item: Path) -> ClosedJaxpr:
        jaxpr = self.of(body.jaxpr, names, item)
        if jaxpr is body.jaxpr:
            return body
        key = id(jaxpr), *map(id, body.consts)
        return self._closed.setdefault(key, body.replace(jaxpr=jaxpr))


def _handed(eqn: JaxprEqn, body: ClosedJaxpr, named: dict[Any, str]) -> Names:
    """Return the names of a body's inputs, the last operands of its equation."""
    count = len(body.jaxpr.invars)
    is_condition = wiring(eqn) is Wiring.WHILE and body is nested(eqn)[0]
    if is_condition or count > len(eqn.invars):
        return (None,) * count
    operands = eqn.invars[len(eqn.invars) - count :]
    return tuple(named.get(v) if isinstance(v, Var) else None for v in operands)


def _index(names: Collection[str], path: Path) -> str | None:
    """Return the one item of a list whose parameters have some names.

    >>> _index(["net.blocks[2].scale", "net.blocks[2].bias"], ("Net", "blocks"))
    '2'
    """
    if not names:
        return None
    outer = [_ITEM.format(name) + f"(?<=\\[{n}\\])" for name, n in pairwise(path) if n.isdigit()]
    pattern = re.compile(".*?".join([*outer, _ITEM.format(path[-1])]))
    matches = (pattern.search(name) for name in names)
    return _one(match[match.lastindex or 0] for match in matches if match)


def _one(found: Iterable[str]) -> str | None:
    """Return what all of something are; ``None`` where they differ, or there are none."""
    distinct = set(found)
    return distinct.pop() if len(distinct) == 1 else None


def _spread(
    known: Sequence[str | None], places: Sequence[Place], backward: bool
) -> list[str | None]:
    """Return the item of each equation: that of its run, or of those on both sides of the run.

    A run ends where the code starts again.
    """
    found, runs = list(known), list[list[int]]()
    for n, place in enumerate(places):
        before = places[n - 1] if n else place
        starts = n == 0 or (place > before if backward else place < before)
        runs.append([n]) if starts else runs[-1].append(n)
    items = [_one(k for n in run if (k := known[n]) is not None) for run in runs]
    for at, run in enumerate(runs):
        item = items[at]
        if item is None and all(known[n] is None for n in run):
            before = next((k for k in reversed(items[:at]) if k is not None), None)
            after = next((k for k in items[at + 1 :] if k is not None), None)
            item = before if before == after else None
        for n in run:
            found[n] = known[n] or item
    return found
