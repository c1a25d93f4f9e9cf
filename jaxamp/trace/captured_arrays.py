"""Arrays that an object holds: a trace that has captured one must not go stale.

What is looked through are attributes, containers, pytrees and the objects in all of these. An array
can be reached in several ways, of which the program has taken one: all must still lead to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

_ARRAYS = (jax.Array, np.ndarray)
_NEITHER = (str, bytes, int, float, complex, type(None), type, FunctionType, ModuleType)
_LONG = 64  # items of a container
_MOST = 10_000  # objects that are looked through: a data set may be among them


class Way(NamedTuple):
    """One step from an object to what it holds; objects are numbered, and 0 is the owner.

    Attributes:
      holder: the number of the one.
      step: gives the other.
      held: the number of that.
    """

    holder: int
    step: Callable[[Any], Any]
    held: int


class Held(NamedTuple):
    """Arrays that a trace has captured from an object. No other object is kept alive by this.

    Attributes:
      owner: which of several objects.
      ways: all ways to the arrays, so that none comes before the first one to where it starts.
      arrays: the arrays, by their numbers.
    """

    owner: int
    ways: Sequence[Way]
    arrays: dict[int, Any]

    def is_so(self, owner: Any) -> bool:
        """Whether all ways still lead to the same."""
        met = {0: _owner(owner), **self.arrays}
        try:
            for holder, step, held in self.ways:
                value = step(met[holder])
                if met.setdefault(held, value) is not value:
                    return False
        except (AttributeError, LookupError, TypeError):
            return False
        return True


def captured(closed: ClosedJaxpr, owners: Iterable[Any]) -> list[Held]:
    """Where objects hold arrays that are constants of a program.

    >>> from types import SimpleNamespace
    >>> layer = SimpleNamespace(weight=jax.numpy.ones(3), seen=jax.numpy.zeros(3))
    >>> model = SimpleNamespace(layers=[layer])
    >>> program = jax.make_jaxpr(lambda x: x * model.layers[0].weight)(1.0)
    >>> held = captured(program, [model])
    >>> are_held(held, [model])
    True
    >>> layer.weight = 2 * layer.weight
    >>> are_held(held, [model])
    False
    """
    walked = [(index, *_walk(_owner(owner))) for index, owner in enumerate(owners)]
    if not any(arrays for _, _, arrays in walked):
        return []
    known = set(_constants(closed))
    found = []
    for index, ways, arrays in walked:
        read = {number: a for number, a in arrays.items() if _address(a) in known}
        if read:
            found.append(Held(index, _leading_to(read, ways), read))
    return found


def are_held(found: Iterable[Held], owners: Iterable[Any]) -> bool:
    """Whether the same objects, in the same order, still hold these very arrays."""
    if not found:
        return True
    owners = list(owners)
    return all(held.is_so(owners[held.owner]) for held in found)


def _owner(owner: Any) -> Any:
    return owner.__self__ if isinstance(owner, MethodType) else owner


def _walk(owner: Any) -> tuple[list[Way], dict[int, Any]]:
    """All ways from an object, breadth first, and the arrays to which they lead."""
    if isinstance(owner, type | ModuleType):
        return [], {}
    ways: list[Way] = []
    arrays: dict[int, Any] = {}
    objects = [owner]  # each is kept until the end: of those that die, others get the addresses
    numbers = {id(owner): 0}
    pending = [owner]
    for value in islice(pending, _MOST):
        holder = numbers[id(value)]
        for step, part in _attributes(value) if value is owner else _parts(value):
            number = numbers.setdefault(id(part), len(objects))
            ways.append(Way(holder, step, number))
            if number < len(objects):
                continue
            objects.append(part)
            if isinstance(part, _ARRAYS):
                arrays[number] = part
            elif not isinstance(part, _NEITHER):
                pending.append(part)
    return ways, arrays


def _leading_to(arrays: Iterable[int], ways: Sequence[Way]) -> list[Way]:
    """Those of all ways that are part of one to an array."""
    holders = defaultdict(list)
    for way in ways:
        holders[way.held].append(way.holder)
    pending = list(arrays)
    needed = set(pending)
    for number in pending:
        new = set(holders[number]) - needed - {0}
        needed |= new
        pending += new
    return [way for way in ways if way.held in needed]


def _parts(value: Any) -> Iterable[tuple[Callable[[Any], Any], Any]]:
    """What an object holds, and how to get each."""
    if isinstance(value, dict):  # whose keys JAX might not be able to sort
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    elif not jax.tree_util.all_leaves([value]):
        return [(_leaf(n), leaf) for n, leaf in enumerate(jax.tree.leaves(value))]
    else:
        return _attributes(value)
    if len(items) > _LONG and isinstance(items[0][1], _NEITHER):
        return []  # a vocabulary, say
    return [(itemgetter(key), part) for key, part in items]


def _attributes(value: Any) -> Iterator[tuple[Callable[[Any], Any], Any]]:
    for name, part in list(getattr(value, "__dict__", {}).items()):  # another thread may add one
        yield _attribute(name), part
    for cls in type(value).__mro__:
        for slot in vars(cls).values():
            if isinstance(slot, MemberDescriptorType):  # so are what a method is bound to, and such
                try:
                    yield slot.__get__, slot.__get__(value)
                except AttributeError:  # nothing was put there
                    continue


def _attribute(name: str) -> Callable[[Any], Any]:
    return lambda owner: owner.__dict__[name]


def _leaf(number: int) -> Callable[[Any], Any]:
    return lambda tree: jax.tree.leaves(tree)[number]


def _constants(closed: ClosedJaxpr) -> Iterator[tuple[bool, int]]:
    """Addresses of the constants of a program, and of what it calls."""
    yield from map(_address, closed.consts)
    for eqn in closed.eqns:
        for param in eqn.params.values():
            for inner in param if isinstance(param, tuple) else (param,):
                if isinstance(inner, ClosedJaxpr):
                    yield from _constants(inner)


def _address(array: Any) -> tuple[bool, int]:
    """Of numpy's arrays that of their numbers: JAX captures a view of them."""
    array = getattr(array, "val", array)
    if isinstance(array, np.ndarray):
        return True, array.__array_interface__["data"][0]
    return False, id(array)
