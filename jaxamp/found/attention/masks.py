"""Masks of an attention: which keys a query is known to see, and which rows may see none."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend.core import Literal

from jaxamp.found.attention.kernels.known_masks import known_mask
from jaxamp.found.attention.kernels.spec import AttentionSpec
from jaxamp.found.attention.layout import Layout, arranged, thinned
from jaxamp.found.attention.match import Bias, Found, Masking, Step
from jaxamp.found.attention.scores import LEAST, Scores
from jaxamp.found.attention.slopes import floats_of, is_arithmetic
from jaxamp.found.levels import Atom
from jaxamp.found.values import size_of


def kernel_words(
    found: Found, scores: Scores, layout: Layout
) -> tuple[AttentionSpec, list[Step], bool]:
    """Return an attention's parameters, the steps that are left, and whether no row is empty.

    Scales and known masks are parameters of a kernel; the other steps are added to scores.
    """
    scale = float(found.scale)
    seen, rest, is_sure = _known(found, scores, layout)
    if (spec := _spec_of(seen, scale)) is None:
        return AttentionSpec(scale), found.steps, is_sure
    return spec, rest, is_sure


def _known(
    found: Found, scores: Scores, layout: Layout
) -> tuple[np.ndarray | None, list[Step], bool]:
    """Return which keys a query is known to see, the other steps, and whether no row is empty."""
    every: np.ndarray | None = None
    whole: Any = None
    rest: list[Step] = []
    is_sure = True
    for step in found.steps:
        seen = _known_mask(step, scores, layout)
        if seen is None:
            rest.append(step)
            is_low = isinstance(step, Bias) and _may_be_low(step, scores)
            is_sure = is_sure and not is_low and not isinstance(step, Masking)
            continue
        whole = seen if whole is None else whole & seen
        flat = seen.reshape(-1, *seen.shape[-2:])
        if flat.shape[0] == 1 or (flat == flat[:1]).all():
            every = flat[0] if every is None else every & flat[0]
        else:
            rest.append(step)
    if whole is not None and not whole.any(-1).all():
        return None, found.steps, False
    if every is not None:
        every = np.broadcast_to(every, [*map(size_of, layout.scores[-2:])])
        if not is_sure and not every.all():
            return None, found.steps, False  # rows that are empty only by both
    return every, rest, is_sure


def _known_mask(step: Step, scores: Scores, layout: Layout) -> Any:
    """Return bool[..., T, S] of a step that is a mask of known numbers."""
    known, home = scores.known, scores.home(step.factor)
    if home is None or home not in known:
        return None
    number = np.asarray(known.thin(home))
    varies = (n == size_of(p) for n, p in zip(number.shape, step.factor.places, strict=True))
    places = [p if v else () for p, v in zip(step.factor.places, varies, strict=True)]
    if home in {value for value, _ in scores.homes.values()}:
        return None
    array = arranged(number, places, thinned(places, layout.scores), np)
    if isinstance(step, Masking):
        return array.astype(bool) == step.sign
    array = array * step.number
    if not np.isin(array, [0.0]).any() or not ((array == 0) | (array <= LEAST)).all():
        return None
    return array == 0


def _may_be_low(step: Bias, scores: Scores) -> bool:
    """Return whether a bias may stand for minus infinity: an argument, or made from such a number.

    Followed through arithmetic and moves; what is looked up in a table, or is a product or a sum of
    activations, is an ordinary number.
    """
    known, home = scores.known, scores.home(step.factor)
    pending: list[Atom] = [] if home is None else [home]
    seen = set[int]()
    while pending:
        atom = pending.pop()
        if isinstance(atom, Literal) or atom in known:
            if np.any(np.abs(known.thin(atom)) >= -LEAST):
                return True
        elif atom not in seen:
            seen.add(atom)
            unit = scores.level.makers.get(atom)
            if unit is None:
                return True
            if is_arithmetic(unit):
                pending += [operand for operand, _ in floats_of(unit)]
    return False


def _spec_of(seen: np.ndarray | None, scale: float) -> AttentionSpec | None:
    """Return an attention with a known mask bool[T, S]; ``None`` for one of no kind."""
    if seen is None or seen.all():
        return AttentionSpec(scale)
    if seen.shape[0] == seen.shape[1] and (causal := _causal(seen, scale)) is not None:
        return causal
    mask = known_mask(seen)
    return mask and AttentionSpec(scale, mask=mask)


def _causal(seen: np.ndarray, scale: float) -> AttentionSpec | None:
    """Return an attention in which queries see no later key; ``None`` for other masks."""
    rows, first = np.arange(len(seen)), seen.argmax(axis=1)
    if (first > rows).any():
        return None
    number = _linked(first)
    segments = known_mask(number[:, None] == number) if number.any() else None
    for window in (None, int(np.max(rows - first)) + 1):
        wanted = np.tri(len(rows), dtype=bool)
        if window is not None:
            wanted &= ~np.tri(len(rows), k=-window, dtype=bool)
        if segments is not None:
            wanted &= segments.seen(np)
        if (seen == wanted).all():
            return AttentionSpec(scale, True, window, segments)
    return None


def _linked(first: np.ndarray) -> np.ndarray:
    """Return one number for all queries of a segment, from the first key that each sees.

    That is of its segment, but not the first of it where a window is shorter: that one sees an
    earlier one, and so on. Where a window is shorter than a gap in a segment, its parts have
    numbers of their own, which the window parts as well.
    """
    while (further := first[first] != first).any():
        first = np.where(further, first[first], first)
    return first
