"""Axes of an attention as those of a kernel's operands, and arrays that are brought into them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxamp.found.attention.match import Found
from jaxamp.found.values import Axis, Factor, Place, size_of


class Layout(NamedTuple):
    """Axes of an attention as those of a kernel's arrays: the places of each."""

    q: tuple[Place, ...]  # [*b, T, N, H]
    k: tuple[Place, ...]  # [*b, S, K, H]
    v: tuple[Place, ...]  # [*b, S, K, V]
    out: tuple[Place, ...]  # [*b, T, N, V]
    scores: tuple[Place, ...]  # [*b, N, T, S]


def layout_of(found: Found, ordered: Sequence[Axis]) -> Layout | None:
    """Choose which axes are batch, heads, queries and keys; ``None`` if there is one query.

    Axes that masks tell apart, those `ordered`, are no heads.
    """
    alone = [a for a in _order(found.q) if a in found.alone]
    if not alone:
        return None
    masked = [a for a in alone if a in ordered]
    first = masked[0] if len(masked) == 1 else max(alone, key=lambda a: a.size)
    query, group = (first,), tuple(a for a in alone if a is not first)
    shared = [a for a in found.shared if a in found.k.axes or a in found.v.axes]
    inner = [a for a in _order(found.q) if a in shared] or shared
    key_head = (inner[-1],) if inner and (group or len(shared) > 1) else ()
    batch = tuple((a,) for a in found.shared if a not in key_head)
    heads = (*key_head, *group)
    keys = tuple(a for a in _order(found.k) if a in found.keys)
    own = frozenset(found.axes)
    head = tuple(a for a in _order(found.k) if a not in own)
    width = tuple(a for a in _order(found.v) if a not in own)
    return Layout(
        q=(*batch, query, heads, head),
        k=(*batch, keys, key_head, head),
        v=(*batch, keys, key_head, width),
        out=(*batch, query, heads, width),
        scores=(*batch, heads, query, keys),
    )


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
    """Return an array in a shape; axes of size one come last, as JAX knows where the rest lies."""
    if tuple(array.shape) == tuple(shape):
        return array
    merged = [n for n in shape if n != 1]
    if merged != [n for n in array.shape if n != 1]:
        array = numpy.reshape(array, merged)
    return array if array.shape == tuple(shape) else numpy.reshape(array, shape)


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
