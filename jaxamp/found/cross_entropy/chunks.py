"""Compute a pass over tokens in a loop over chunks of them, with the program's own equations.

A chunk is read and written where it lies. It has every n-th token where there are several devices,
so that tokens which lie on them do so in each chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from jaxamp.core import jax_compat
from jaxamp.found.cross_entropy.passes import Key, Pass, Step
from jaxamp.found.cross_entropy.read_anew import read_anew
from jaxamp.found.cross_entropy.rows import Rows, resized
from jaxamp.found.cross_entropy.undivided import undivided


class Division(NamedTuple):
    """Division of tokens into chunks.

    Attributes:
      tokens: how many there are.
      chunks: how many parts they are divided into.
      words: how many logits each has.
      is_alone: whether one device has them all. A chunk has neighbours then, which lie together,
        and its logits two axes, see `read_anew`.
    """

    tokens: int
    chunks: int
    words: int
    is_alone: bool

    @property
    def each(self) -> int:
        """The number of tokens of a chunk; the last of some may be none of the program's."""
        return -(-self.tokens // self.chunks)

    @property
    def all(self) -> Rows:
        """Where tokens are in an array of one number of each, of a chunk's own beyond the last."""
        return Rows(0, 1, 1, 0, self.each * self.chunks)

    def is_whole(self, rows: Rows) -> bool:
        """Return whether every chunk has tokens in all its rows."""
        return (rows.start, rows.length) == (0, self.each * self.chunks)

    def split(self, array: Any, rows: Rows) -> Any:
        """Return an array with four axes in the place of its tokens: one of them counts chunks."""
        axis = rows.axis
        array = _with_parts(array, axis, 1, rows.outer, rows.length, rows.inner)
        if not self.is_whole(rows):
            more = (rows.start, self.each * self.chunks - rows.start - rows.length)
            array = jnp.pad(array, [more if i == axis + 1 else (0, 0) for i in range(array.ndim)])
        parts = (self.chunks, self.each) if self.is_alone else (self.each, self.chunks)
        return _with_parts(array, axis + 1, 1, *parts)

    def join(self, array: Any, rows: Rows) -> Any:
        """Return an array from one that was `split`."""
        axis = rows.axis
        array = _with_parts(array, axis + 1, 2, self.each * self.chunks)
        if not self.is_whole(rows):
            array = lax.slice_in_dim(array, rows.start, rows.start + rows.length, axis=axis + 1)
        return _with_parts(array, axis, 3, rows.outer * rows.length * rows.inner)

    def part(self, array: Any, rows: Rows, chunk: Any) -> Any:
        """Return a chunk of an array that was `split`."""
        part = lax.dynamic_index_in_dim(array, chunk, self._axis(rows), keepdims=False)
        return _with_parts(part, rows.axis, 3, rows.outer * self.each * rows.inner)

    def put(self, array: Any, part: Any, rows: Rows, chunk: Any) -> Any:
        """Return an array that was `split` with another chunk."""
        part = _with_parts(part, rows.axis, 1, rows.outer, self.each, rows.inner)
        return lax.dynamic_update_index_in_dim(array, part, chunk, self._axis(rows))

    def _axis(self, rows: Rows) -> int:
        return rows.axis + (1 if self.is_alone else 2)


def _with_parts(array: Any, axis: int, old: int, *parts: int) -> Any:
    """Return an array with some axes, of which there were `old`, in other parts."""
    return jnp.reshape(array, (*array.shape[:axis], *parts, *array.shape[axis + old :]))


def as_written(
    made: Pass, division: Division, read: Callable[[int], Any], *, again: bool
) -> dict[int, Any]:
    """Return what a pass makes; for a derivative, what has the size of logits is made `again`."""
    body = read_anew(functools.partial(in_chunk, made, division), in_rows=division.is_alone)
    if again:
        body = jax.checkpoint(body, prevent_cse=False)
    found = looped(made, division, read, body, {}, _scan)
    return {value: array for (value, _), array in found.items()}


def looped(
    made: Pass,
    division: Division,
    read: Callable[[int], Any],
    body: Callable[[Mapping[Key, Any], Any], dict[Key, Any]],
    more: dict[Key, Any],
    loop: Callable[[Callable[[Any, Any], Any], Any, int], Any],
) -> dict[Key, Any]:
    """Return what a body computes of the inputs of a pass, chunk by chunk.

    Args:
      made: the pass.
      division: of the tokens.
      read: returns a value of the program.
      body: gets the inputs for some tokens, and which these are.
      more: the types of what it makes beside the outputs of the pass.
      loop: runs a function of the number of a chunk and a state, from a state, so often.
    """
    parts = {(v, rows): division.split(read(v), rows) for v, rows in made.inputs if rows}
    wholes = {key: undivided(read(key[0]), division.words) for key in made.inputs if not key[1]}
    places = division.split(jnp.arange(division.all.length, dtype=jnp.int32), division.all)

    def each(chunk: Any, state: dict[Key, Any]) -> dict[Key, Any]:
        own = {key: division.part(array, key[1], chunk) for key, array in parts.items()}
        found = body(wholes | own, division.part(places, division.all, chunk))
        return {
            key: division.put(old, found[key], key[1], chunk) if key[1] else old + found[key]
            for key, old in state.items()
        }

    start = {key: zeros(aval) for key, aval in (made.types() | more).items()}
    start = {key: division.split(x, key[1]) if key[1] else x for key, x in start.items()}
    return {
        key: division.join(x, key[1]) if key[1] else undivided(x, division.words)
        for key, x in loop(each, start, division.chunks).items()
    }


def _scan(step: Callable[[Any, Any], Any], state: Any, count: int) -> Any:
    return lax.scan(lambda state, i: (step(i, state), None), state, jnp.arange(count))[0]


def zeros(aval: Any) -> Any:
    """Return zeros that lie as an array does, and vary over devices as it does."""
    if jax_compat.has_typed_sharding(aval):
        return jax.sharding.reshard(jnp.zeros(aval.shape, aval.dtype), aval.sharding.spec)
    varies = tuple(jax_compat.varies_over(aval))
    zero = jnp.zeros(aval.shape, aval.dtype)
    return lax.pcast(zero, varies, to="varying") if varies else zero


def in_chunk(made: Pass, division: Division, env: Mapping[Key, Any], tokens: Any) -> dict[Key, Any]:
    """Return what a pass makes of some tokens, i32[t]: rows, and what they add to sums."""
    values = dict(env)
    for step in made.steps.values():
        with jax_compat.emitting(step.unit.eqn):
            results = _computed(step, division, values, tokens)
        for out, result in zip(step.unit.outs, results, strict=True):
            values[out, step.flow.result] = result  # type: ignore[index]
    return {key: values[key] for key in made.outputs.items()}


def _computed(
    step: Step, division: Division, values: Mapping[Any, Any], tokens: Any
) -> Sequence[Any]:
    """Return the results of an equation for some tokens."""
    eqn, name, flow = step.unit.eqn, step.unit.eqn.primitive.name, step.flow
    operands = [
        jax_compat.literal_value(key) if isinstance(key, Literal) else values[key]
        for key in step.operands
    ]
    if any(place is not None for place in step.places):
        operands[1] = _within_chunk(operands[1], step)
    if name == "sharding_constraint" and not _divides(eqn.params["sharding"], operands[0]):
        return operands
    if flow.result is None or name == "pad":
        filling = operands[1] if name == "pad" else 0
        for i, rows in enumerate(flow.operands):
            if rows is not None and not division.is_whole(rows):
                here = _present(operands[i], rows, tokens)
                operands[i] = jnp.where(here, operands[i], jnp.asarray(filling, operands[i].dtype))
    params = resized(eqn, flow, len(tokens))
    if any(step.turned):
        contracted, batch = eqn.params["dimension_numbers"]
        sides = zip(contracted, step.turned, strict=True)
        turned = tuple(tuple(1 - i for i in axes) if turn else axes for axes, turn in sides)
        params["dimension_numbers"] = turned, batch
    return jax_compat.bind(eqn, operands, **params)


def _divides(sharding: Any, array: Any) -> bool:
    """Return whether devices can have equal parts of a chunk."""
    try:
        sharding.shard_shape(array.shape)
    except ValueError:
        return False
    return True


def _present(array: Any, rows: Rows, tokens: Any) -> Any:
    """Return which rows of a chunk are those of tokens that an array of the program has."""
    here = (tokens >= rows.start) & (tokens < rows.start + rows.length)
    spread = jnp.broadcast_to(here[:, None], (rows.outer, len(here), rows.inner)).reshape(-1)
    return lax.broadcast_in_dim(spread, array.shape, (rows.axis,))


def _within_chunk(indices: Any, step: Step) -> Any:
    """Return indices that count the tokens of a chunk where they count all."""
    rows, last = step.flow.operands[1], indices.ndim - 1
    number = lax.broadcasted_iota(jnp.int32, indices.shape, last)
    for i, place in enumerate(step.places):
        if rows is not None and place == rows.axis:
            own = lax.broadcasted_iota(indices.dtype, indices.shape, rows.axis)
            indices = jnp.where(number == i, own, indices)
    return indices
