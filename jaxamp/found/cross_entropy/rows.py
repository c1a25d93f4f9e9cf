"""Rows of arrays: which axis counts the tokens, and which equations treat each row by itself.

An equation is described by labels of its axes: axes of operands and results with one label are the
same axis. If tokens are along a label that a result has, its rows depend on the same rows of the
operands alone; if they are along one that is summed over, chunks of the result add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from jaxamp.core.taxonomy import is_by_element


class Rows(NamedTuple):
    """An axis of an array that counts tokens."""

    axis: int  # its index
    outer: int  # how many other things it counts too, of which each has all tokens
    inner: int  # how many things each token has there
    start: int  # the first token that is there
    length: int  # the number of tokens that are there

    def __lt__(self, other: Any) -> bool:  # JAX sorts the keys of dictionaries
        return other is not None and tuple(self) < tuple(other)

    def __gt__(self, other: Any) -> bool:
        return other is None or tuple(self) > tuple(other)

    def shape(self, shape: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Return the shape of an array that has so many tokens in the place of its own."""
        return tuple(
            self.outer * tokens * self.inner if i == self.axis else n for i, n in enumerate(shape)
        )


class Flow(NamedTuple):
    """Course of tokens through an equation."""

    # Per operand where its tokens are; ``None`` where all rows read all of it.
    operands: tuple[Rows | None, ...]
    result: Rows | None  # where those of the results are; ``None`` if it is a sum over tokens
    # Of a lookup, per number of an index the axis of the indices that it counts.
    places: tuple[int | None, ...] = ()


class _Labels(NamedTuple):
    """Labels of the axes of an equation; ``None`` for an axis that belongs to no other."""

    operands: Sequence[Sequence[Any]]  # per operand those of its axes
    result: Sequence[Any]  # those of each result
    summed: frozenset[Any] = frozenset()  # labels that are summed over


def flow(
    eqn: JaxprEqn,
    operands: Sequence[Rows | None] = (),
    places: tuple[int | None, ...] = (),
    result: Rows | None = None,
) -> Flow | None:
    """Return how tokens go through an equation; ``None`` if rows mix.

    Where they are is known of one operand at least, or of none and the `result`. Of a lookup,
    `places` are per number of an index the axis of the indices that it counts.
    """
    shapes, results = _shapes(eqn)
    given = [(i, rows) for i, rows in enumerate(operands) if rows is not None]
    rows = result or given[0][1]
    if eqn.primitive.name == "reshape":
        sides = (results[0], shapes[0]) if result else (shapes[0], results[0])
        moved = eqn.params["dimensions"] is None and _reshaped(rows, *sides)
        return Flow((moved if result else rows,), result or moved) if moved else None
    if eqn.primitive.name in ("slice", "pad"):  # what fills a padding has no axis
        found = _cut(eqn, rows)
        return found if not result or (found and found.result == result) else None
    labels = _labels(eqn, shapes, results[0], places)
    if labels is None:
        return None
    found = {(labels.operands[i][r.axis], *r[1:]) for i, r in given}
    found |= {(labels.result[rows.axis], *rows[1:])} if result else set()
    if len(found) != 1:
        return None
    ((label, *rest),) = found

    def place(axes: Sequence[Any]) -> Rows | None:
        return Rows(axes.index(label), *rest) if label in axes else None

    if label is None or label not in {*labels.result, *labels.summed}:
        return None
    return Flow(tuple(map(place, labels.operands)), place(labels.result), places)


def resized(eqn: JaxprEqn, flowing: Flow, tokens: int) -> dict[str, Any]:
    """Return the parameters of an equation that change if so many tokens go through it."""
    params, rows = eqn.params, flowing.result
    match eqn.primitive.name:
        case "broadcast_in_dim" | "iota" if rows:
            return {"shape": rows.shape(params["shape"], tokens)}
        case "reshape" if rows:
            return {"new_sizes": rows.shape(params["new_sizes"], tokens)}
        case "slice" if rows:
            start = list(params["start_indices"])
            start[rows.axis] = 0
            limits = rows.shape(params["limit_indices"], tokens)
            return {"start_indices": tuple(start), "limit_indices": limits}
        case "gather" if flowing.operands[0] is not None:
            at = flowing.operands[0]
            if params["slice_sizes"][at.axis] > 1:
                return {"slice_sizes": at.shape(params["slice_sizes"], tokens)}
        case "pad" if rows:
            padded = list(params["padding_config"])
            padded[rows.axis] = (0, 0, 0)
            return {"padding_config": tuple(padded)}
    return {}


def _shapes(eqn: JaxprEqn) -> list[list[tuple[int, ...]]]:
    """Return the shapes of the operands of an equation, and those of its results."""
    both: list[Any] = [eqn.invars, eqn.outvars]
    return [[tuple(getattr(v.aval, "shape", ())) for v in values] for values in both]


def _reshaped(rows: Rows, shape: Sequence[int], new: Sequence[int]) -> Rows | None:
    """Return where tokens are after a reshape, if they are in one axis still."""
    before = math.prod(shape[: rows.axis]) * rows.outer
    after = math.prod(shape[rows.axis + 1 :]) * rows.inner
    for axis, size in enumerate(new):
        outer, left = divmod(before, math.prod(new[:axis]))
        inner, right = divmod(after, math.prod(new[axis + 1 :]))
        if not left and not right and outer * rows.length * inner == size and rows.length > 1:
            return Rows(axis, outer, inner, rows.start, rows.length)
    return None


def _cut(eqn: JaxprEqn, rows: Rows) -> Flow | None:
    """Return how tokens go through a slice or a padding, along their own axis too."""
    (whole, *numbers), (part,) = _shapes(eqn)
    if eqn.primitive.name == "pad":
        low, _, apart = eqn.params["padding_config"][rows.axis]
    else:
        low, apart = -eqn.params["start_indices"][rows.axis], eqn.params["strides"]
    high = part[rows.axis] - whole[rows.axis] - low
    if apart or ((low or high) and (rows.outer, rows.inner) != (1, 1)):
        return None
    start, length = rows.start - low, rows.length + low + high
    return Flow((rows, *(None for _ in numbers)), rows._replace(start=start, length=length))


_REDUCED = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and",
                      "reduce_or", "argmax", "argmin"})  # fmt: skip
_MIXED = {"concatenate": "dimension", "iota": "dimension", "rev": "dimensions"} | dict.fromkeys(
    ("split", "cumsum", "cummax", "cummin", "cumlogsumexp", "cumprod"), "axis"
)
"""The parameter that has the axes along which a result depends on the place, or on others."""


def _labels(
    eqn: JaxprEqn,
    shapes: Sequence[tuple[int, ...]],
    result: tuple[int, ...],
    places: Sequence[int | None],
) -> _Labels | None:
    name, params = eqn.primitive.name, eqn.params
    if is_by_element(eqn.primitive):
        return _elementwise(shapes, result)
    if name in _MIXED:
        mixed = params[_MIXED[name]]
        mixed = mixed if isinstance(mixed, tuple) else (mixed,)
        own = [None if i in mixed else i for i in range(len(result))]
        return _Labels([own] * len(shapes), own)
    axes: list[Any] = list(range(len(shapes[0]))) if shapes else []
    if name in _REDUCED:
        gone = frozenset(params["axes"])
        kept = [None if i in gone else i for i in axes]
        own = axes if name == "reduce_sum" else kept
        return _Labels([own], [i for i in kept if i is not None], gone)
    match name:
        case "broadcast_in_dim":
            at = params["broadcast_dimensions"]
            own = [j if n == result[j] else None for j, n in zip(at, shapes[0], strict=True)]
            return _Labels([own], range(len(result)))
        case "transpose":
            return _Labels([axes], params["permutation"])
        case "squeeze":
            return _Labels([axes], [i for i in axes if i not in params["dimensions"]])
        case "dot_general":
            return _contraction(params["dimension_numbers"], shapes)
        case "gather" | "scatter-add" | "scatter":
            return _lookup(params, shapes, places)
    return None


def _elementwise(shapes: Sequence[tuple[int, ...]], result: tuple[int, ...]) -> _Labels:
    """Return labels of operands of which some are scalars, or repeat along axes of size one."""
    operands = [
        [axis if n == result[axis] else None for axis, n in enumerate(shape)] for shape in shapes
    ]
    return _Labels(operands, range(len(result)))


def _contraction(numbers: Any, shapes: Sequence[tuple[int, ...]]) -> _Labels:
    (left, right), (batch_left, batch_right) = numbers
    first: list[Any] = [("lhs", i) for i in range(len(shapes[0]))]
    second: list[Any] = [("rhs", i) for i in range(len(shapes[1]))]
    for i, j in zip((*left, *batch_left), (*right, *batch_right), strict=True):
        second[j] = first[i]
    free = [first[i] for i in range(len(first)) if i not in (*left, *batch_left)]
    free += [second[j] for j in range(len(second)) if j not in (*right, *batch_right)]
    batch = [first[i] for i in batch_left]
    return _Labels([first, second], [*batch, *free], frozenset(first[i] for i in left))


def _lookup(
    params: dict[str, Any], shapes: Sequence[tuple[int, ...]], places: Sequence[int | None]
) -> _Labels:
    """Return labels of a gather, or of a scatter, whose updates are as a gather's result.

    An axis that an index counts like an axis of the indices themselves is that one.
    """
    of = params["dimension_numbers"]
    batched, is_gather = of.operand_batching_dims, "slice_sizes" in params
    if is_gather:
        by, by_index = of.start_indices_batching_dims, of.start_index_map
        gone, at = of.collapsed_slice_dims, of.offset_dims
    else:
        by, by_index = of.scatter_indices_batching_dims, of.scatter_dims_to_operand_dims
        gone, at = of.inserted_window_dims, of.update_window_dims
    index: list[Any] = [("index", j) for j in range(len(shapes[1]) - 1)] + [None]
    own: list[Any] = [None] * len(shapes[0])
    for i, j in zip(batched, by, strict=True):
        own[i] = index[j]
    for i, place in zip(by_index, places, strict=False):
        if place is not None and shapes[0][i] == shapes[1][place]:
            own[i] = index[place]
    window = [i for i in range(len(own)) if i not in (*gone, *batched)]
    for i, axis in zip(window, at, strict=True):
        size = params["slice_sizes"][i] if is_gather else shapes[2][axis]
        own[i] = ("window", i) if size == shapes[0][i] and i not in by_index else None
    rest, inside = iter(index[:-1]), iter(window)
    ranks = range(len(index) - 1 + len(window))
    looked_up = [own[next(inside)] if i in at else next(rest) for i in ranks]
    return _Labels([own, index], looked_up) if is_gather else _Labels([own, index, looked_up], own)
