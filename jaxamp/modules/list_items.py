"""Write into name stacks what call stacks alone do not tell: modules around, and items of lists.

The call stack of an equation is the same for every item. But parameters have names in a program's
arguments, such as ``net.blocks[2].linear.kernel``: an equation that reads one belongs to that item,
and so do those beside it, as far as the code only goes forward, or back in a backward pass. There
an equation also belongs to the item whose values it reads at the same place in the code. What no
item is known of keeps the name of the list.

An equation of an inner jaxpr gets the path of its modules from its call stack and from those around
it, ``module[Net.blocks.linear]``; see `call_stacks.py`.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from jaxamp.core import jax_compat
from jaxamp.jaxprs.name_stack import Path, called_mark, with_items
from jaxamp.jaxprs.nested import Wiring, changed_inside, nested, wiring
from jaxamp.modules.call_stacks import (
    Around,
    Calls,
    Frames,
    calls_of_all,
    calls_within,
    entered,
    frames_of,
    modules_of,
    shown_calls,
    taken_out,
)

_ITEM = r"\b{}'?\]?\[(\d+)\]"  # of `net.blocks[2].scale` or `['blocks'][2]['scale']`
_ITEMS = re.compile(_ITEM.format(r"(\w+)"))
Names = tuple[str | None, ...]  # of the inputs of a jaxpr
Place = tuple[int, ...]  # the instructions that the frames inside an item are at
Modules = tuple[tuple[str, int], ...]  # each with the frame of its method


def name_modules(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a program with modules and items of lists in its name stacks, where JAX tells none."""
    names = tuple(closed.jaxpr.debug_info.arg_names or ())
    if len(names) != len(closed.jaxpr.invars):
        names = (None,) * len(closed.jaxpr.invars)
    lists = frozenset(found for name in names for found, _ in _ITEMS.findall(name or ""))
    jaxpr = _Namer(lists).of(closed.jaxpr, names if lists else (None,) * len(names), (), ())
    return closed if jaxpr is closed.jaxpr else closed.replace(jaxpr=jaxpr)


class _Site:
    """An equation, the names of parameters that it reads, and the item that it belongs to.

    A call belongs where the first functions do that it calls.
    """

    def __init__(
        self,
        eqn: JaxprEqn,
        named: dict[Any, str],
        item: Path,
        modules: Callable[[Calls], Modules],
        outer: Calls,
        taken: Around,
    ) -> None:
        self.eqn, self.item = eqn, item
        own = shown_calls(eqn.source_info.traceback)
        self.calls = (*outer, *calls_within(taken), *own) if outer or taken else own
        self.marks = [mark for info in taken if (mark := called_mark(info))]
        if taken or modules(own):
            path = (name for name, _ in modules(self.calls))
            self.marks.append(f"module[{'.'.join(path)}]")
        inside = [inner for body in nested(eqn) for inner in body.jaxpr.eqns]
        calls = (*self.calls, *calls_of_all(inside)) if inside else self.calls
        self.frames, self.modules = frames_of(calls), modules(calls)
        self.path = tuple(name for name, _ in self.modules)
        self.backward = "transpose(" in str(eqn.source_info.name_stack)
        operands = [v for v in eqn.invars if isinstance(v, Var)]
        self.names = frozenset(named[v] for v in operands if v in named)
        if len(operands) == 1 and self.names:  # moved, cast or scaled
            named.update(dict.fromkeys(eqn.outvars, *self.names))
        place = frames_of(self.calls)
        self.values = [(place, v) for v in (*operands, *eqn.outvars)]

    def list_at(self, depth: int) -> Path:
        """Return the path of a list so many modules inside, empty if its item is known."""
        if depth + 1 < len(self.path) and self.path[depth + 1].isdigit():
            return ()  # the source has the index
        path = with_items(self.path[: depth + 1], self.item)
        return path if depth < len(self.path) and not path[-1].isdigit() else ()


class _Namer:
    """Writer of name stacks; a jaxpr whose inputs have the same names is one again."""

    def __init__(self, lists: Collection[str]) -> None:
        self.lists = lists
        self._known: dict[Frames, Modules] = {}
        self._plain: dict[int, bool] = {}
        self._stacks: dict[Any, tuple[Any, Any]] = {}  # equal ones stay one object
        self._closed: dict[Any, ClosedJaxpr] = {}
        self._made: dict[Any, tuple[Jaxpr, Jaxpr]] = {}  # the one before too, so that it lives

    def of(self, jaxpr: Jaxpr, names: Names, item: Path, outer: Calls) -> Jaxpr:
        """Return a jaxpr with modules and items in its name stacks."""
        if self._is_plain(jaxpr):
            return jaxpr
        key = id(jaxpr), names, item, frames_of(outer)
        if key not in self._made:
            self._made[key] = jaxpr, self._of(jaxpr, names, item, outer)
        return self._made[key][1]

    def modules(self, calls: Calls) -> Modules:
        """Return the modules of calls, outermost first, each read once."""
        frames = frames_of(calls)
        if frames not in self._known:
            self._known[frames] = modules_of(calls)
        return self._known[frames]

    def _is_plain(self, jaxpr: Jaxpr) -> bool:
        """Return whether no module is called in a jaxpr, and nothing was taken out of its calls."""
        if id(jaxpr) not in self._plain:
            traces = {id(t): t for t in (eqn.source_info.traceback for eqn in jaxpr.eqns)}
            self._plain[id(jaxpr)] = (
                len(entered(jaxpr)) < 2
                and not any(map(self.modules, map(shown_calls, traces.values())))
                and all(self._is_plain(body.jaxpr) for eqn in jaxpr.eqns for body in nested(eqn))
            )
        return self._plain[id(jaxpr)]

    def _of(self, jaxpr: Jaxpr, names: Names, item: Path, outer: Calls) -> Jaxpr:
        named = {v: name for v, name in zip(jaxpr.invars, names, strict=True) if name}
        sites = [
            _Site(eqn, named, item, self.modules, outer, taken)
            for eqn, taken in zip(jaxpr.eqns, taken_out(jaxpr), strict=True)
        ]
        for depth in range(max((len(site.path) for site in sites), default=0)):
            self._find_items(sites, depth)
        eqns = [self._written(site, named, item) for site in sites]
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

    def _written(self, site: _Site, named: dict[Any, str], item: Path) -> JaxprEqn:
        """Return an equation with its modules and its item, and with those of its jaxprs."""
        eqn, marks = site.eqn, site.marks
        if site.item != item:  # first: equal layers differ in nothing that is inside of it
            marks = [f"item[{'.'.join(site.item)}]", *marks]
        if marks:
            eqn = eqn.replace(source_info=self._scoped(eqn.source_info, tuple(marks)))
        return changed_inside(eqn, lambda body: self._body(body, _handed(eqn, body, named), site))

    def _scoped(self, source_info: Any, scopes: tuple[str, ...]) -> Any:
        stack = source_info.name_stack
        key = id(stack), scopes
        if key not in self._stacks:
            named = functools.reduce(jax_compat.with_scope, reversed(scopes), stack)
            self._stacks[key] = stack, named
        return source_info.replace(name_stack=self._stacks[key][1])

    def _body(self, body: ClosedJaxpr, names: Names, site: _Site) -> ClosedJaxpr:
        jaxpr = self.of(body.jaxpr, names, site.item, site.calls)
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
