"""Axes of an attention as those of a kernel's operands, and arrays that are brought into them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxamp.found.attention.match import Found
from jaxamp.found.values import Axis, Factor, Place, size_of


@dataclass(slots=True, eq=False)
class Layout:
    """Axes of an attention as those of the kernels' operands.

    Attributes:
      batch: the leading axes, one each.
      key_head: the axis that counts heads of keys; empty for one head.
      group: axes that count the queries of one head of keys.
      query: the axis of queries.
      keys: the axes of keys.
      head: the axes that queries and keys are multiplied along.
      width: the axes of one value.
    """

    batch: tuple[Axis, ...]
    key_head: Place
    group: Place
    query: Place
    keys: Place
    head: Place
    width: Place

    @property
    def q(self) -> tuple[Place, ...]:
        """The places of queries."""
        return (*self._batch, self.query, (*self.key_head, *self.group), self.head)

    @property
    def k(self) -> tuple[Place, ...]:
        """The places of keys."""
        return (*self._batch, self.keys, self.key_head, self.head)

    @property
    def v(self) -> tuple[Place, ...]:
        """The places of values."""
        return (*self._batch, self.keys, self.key_head, self.width)

    @property
    def out(self) -> tuple[Place, ...]:
        """The places of the output."""
        return (*self._batch, self.query, (*self.key_head, *self.group), self.width)

    @property
    def scores(self) -> tuple[Place, ...]:
        """The places of scores."""
        return (*self._batch, (*self.key_head, *self.group), self.query, self.keys)

    @property
    def _batch(self) -> tuple[Place, ...]:
        return tuple((a,) for a in self.batch)


def layout_of(found: Found, ordered: Sequence[Axis]) -> Layout | None:
    """Choose which axes are batch, heads, queries and keys; ``None`` if there is one query.

    Axes that masks tell apart, those `ordered`, are no heads.
    """
    alone = [a for a in _order(found.q) if a in found.alone]
    if not alone:
        return None
    masked = [a for a in alone if a in ordered]
    query = masked[0] if len(masked) == 1 else max(alone, key=lambda a: a.size)
    group = tuple(a for a in alone if a is not query)
    shared = [a for a in found.shared if a in found.k.axes or a in found.v.axes]
    inner = [a for a in _order(found.q) if a in shared] or shared
    key_head = (inner[-1],) if inner and (group or len(shared) > 1) else ()
    batch = tuple(a for a in found.shared if a not in key_head)
    keys = tuple(a for a in _order(found.k) if a in found.keys)
    own = frozenset(found.axes)
    head = tuple(a for a in _order(found.k) if a not in own)
    width = tuple(a for a in _order(found.v) if a not in own)
    return Layout(batch, key_head, group, (query,), keys, head, width)


def _order(factor: Factor) -> list[Axis]:
    return list(itertools.chain.from_iterable(factor.places))


def arranged(array: Any, places: Sequence[Place], wanted: Sequence[Place], numpy: Any = jnp) -> Any:
    """Return an array with the axes of its places in those wanted: summed over others, or repeated.

    It is computed by JAX's module or by NumPy itself.
    """
    have = list(itertools.chain.from_iterable(places))
    want = list(itertools.chain.from_iterable(wanted))
    array = _reshaped(array, [a.size for a in have], numpy)
    gone = [i for i, a in enumerate(have) if a not in want]
    if gone:
        array = numpy.sum(array, axis=tuple(gone))
        have = [a for a in have if a in want]
    order = [have.index(a) for a in want if a in have]
    if order != sorted(order):
        array = numpy.transpose(array, order)
    if len(order) < len(want):
        array = _reshaped(array, [a.size if a in have else 1 for a in want], numpy)
        array = numpy.broadcast_to(array, [a.size for a in want])
    return _reshaped(array, [size_of(p) for p in wanted], numpy)


def _reshaped(array: Any, shape: Sequence[int], numpy: Any) -> Any:
    return array if tuple(array.shape) == tuple(shape) else numpy.reshape(array, shape)


def thin(array: Any, places: Sequence[Place], wanted: Sequence[Place]) -> Any:
    """Return an array in the wanted places, of size one where it has no axis of a place."""
    return arranged(array, places, thinned(places, wanted))


def thinned(places: Sequence[Place], wanted: Sequence[Place]) -> list[Place]:
    """Return the wanted places, empty where an array has no axis of one."""
    have = set(itertools.chain.from_iterable(places))
    return [p if have & set(p) else () for p in wanted]


def thinned_to(wanted: Sequence[Place], shape: Sequence[int]) -> tuple[Place, ...]:
    """Return places, empty where a shape is one."""
    return tuple(p if n != 1 else () for p, n in zip(wanted, shape, strict=True))
