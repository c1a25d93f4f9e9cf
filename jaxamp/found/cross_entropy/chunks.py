"""Compute a pass over tokens in a loop over chunks of them, with the program's own equations.

A chunk has every n-th token, so that tokens which lie on several devices do so in each chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.sharding import NamedSharding, get_abstract_mesh, use_abstract_mesh

from jaxamp.core import jax_compat
from jaxamp.found.cross_entropy.passes import End, Key, Pass, Rule, Step
from jaxamp.found.cross_entropy.read_anew import read_anew
from jaxamp.found.cross_entropy.rows import Flow, Rows, resized
from jaxamp.found.cross_entropy.undivided import undivided


class Division(NamedTuple):
    """Division of tokens into chunks."""

    tokens: int  # how many there are
    chunks: int  # how many parts they are divided into
    words: int  # how many logits each has, if devices may have some of them each
    in_rows: bool  # whether logits have two axes in a chunk, see `read_anew`
    slices: int = 1  # how many the matrix is read in, see `in_slices`

    @property
    def each(self) -> int:
        """The number of tokens of a chunk; the last of some may be none of the program's."""
        return -(-self.tokens // self.chunks)

    @property
    def places(self) -> Any:
        """i32[chunks, each], which token each of a chunk is."""
        tokens = jnp.arange(self.each * self.chunks, dtype=jnp.int32)
        return self.split(tokens, Rows(0, 1, 1, 0, len(tokens)))

    def is_whole(self, rows: Rows) -> bool:
        """Return whether every chunk has tokens in all its rows."""
        return (rows.start, rows.length) == (0, self.each * self.chunks)

    def split(self, array: Any, rows: Rows) -> Any:
        """Return an array with its chunks along a new first axis."""
        axis, shape = rows.axis, array.shape
        array = _with_parts(array, axis, rows.outer, rows.length, rows.inner)
        if not self.is_whole(rows):
            more = (rows.start, self.each * self.chunks - rows.start - rows.length)
            array = jnp.pad(array, [more if i == axis + 1 else (0, 0) for i in range(array.ndim)])
        array = jnp.moveaxis(_with_parts(array, axis + 1, self.each, self.chunks), axis + 2, 0)
        return jnp.reshape(array, (self.chunks, *rows.shape(shape, self.each)))

    def join(self, stacked: Any, rows: Rows) -> Any:
        """Return an array from its chunks along the first axis."""
        axis, shape = rows.axis, stacked.shape[1:]
        array = _with_parts(stacked, axis + 1, rows.outer, self.each, rows.inner)
        array = jnp.moveaxis(array, 0, axis + 2)  # behind those of a chunk
        if not self.is_whole(rows):
            array = lax.collapse(array, axis + 1, axis + 3)
            array = lax.slice_in_dim(array, rows.start, rows.start + rows.length, axis=axis + 1)
        return jnp.reshape(array, rows.shape(shape, rows.length))


def _with_parts(array: Any, axis: int, *parts: int) -> Any:
    """Return an array with an axis divided into some."""
    return jnp.reshape(array, (*array.shape[:axis], *parts, *array.shape[axis + 1 :]))


def as_written(
    made: Pass, division: Division, read: Callable[[int], Any], *, again: bool
) -> dict[int, Any]:
    """Return what a pass makes; for a derivative, what has the size of logits is made `again`."""
    # Not in slices if it is made again: JAX would add up gradients of slices in all words.
    slices = 1 if again else division.slices
    body = functools.partial(in_chunk, made, division)
    body = read_anew(body, in_rows=division.in_rows, slices=slices)
    if again:
        body = jax.checkpoint(body, prevent_cse=False)
    found = looped(made, division, read, body, {})
    return {value: array for (value, _), array in found.items()}


def looped(
    made: Pass,
    division: Division,
    read: Callable[[int], Any],
    body: Callable[[Mapping[Key, Any], Any], dict[Key, Any]],
    sums: Mapping[Key, Any],
    scan: Callable[..., tuple[Any, Any]] = lax.scan,
) -> dict[Key, Any]:
    """Return what a body computes of the inputs of a pass, chunk by chunk.

    The body gets the inputs for some tokens, and which these are. `sums` are what sums begin with,
    but for those of the pass.
    """
    parts = {(v, rows): division.split(read(v), rows) for v, rows in made.inputs if rows}
    wholes = {key: undivided(read(key[0]), division.words) for key in made.inputs if not key[1]}

    def each(sums: Any, part: Any) -> tuple[Any, Any]:
        found = body(wholes | part[0], part[1])
        added = {key: total + found[key] for key, total in sums.items()}
        return added, {key: array for key, array in found.items() if key[1]}

    start = {(v, None): zeros(aval.shape, aval) for v, aval in made.sums()} | dict(sums)
    totals, stacks = scan(each, start, (parts, division.places))
    totals = {key: undivided(total, division.words) for key, total in totals.items()}
    return totals | {key: division.join(array, key[1]) for key, array in stacks.items()}


def zeros(shape: Sequence[int], aval: Any) -> Any:
    """Return zeros that vary over devices as an array does."""
    varies = tuple(jax_compat.varies_over(aval))
    zero = jnp.zeros(shape, aval.dtype)
    return lax.pcast(zero, varies, to="varying") if varies else zero


def in_chunk(made: Pass, division: Division, env: Mapping[Key, Any], tokens: Any) -> dict[Key, Any]:
    """Return what a pass makes of some tokens, i32[t]: rows, and what they add to sums."""
    values, mesh = dict(env), get_abstract_mesh()
    for step in made.steps.values():
        with jax_compat.emitting(step.unit.eqn, step.unit.around), use_abstract_mesh(mesh):
            results = _computed(step, division, values, tokens)
        for out, result in zip(step.unit.outs, results, strict=True):
            values[out, step.flow.result] = result  # type: ignore[index]
    return {(v, rows): values[v, rows] for v, rows in made.exits if isinstance(v, int)}


def _read(values: Mapping[Key, Any], end: End) -> Any:
    """Return an array of a chunk, or what a literal holds."""
    atom, rows = end
    return jax_compat.literal_value(atom) if isinstance(atom, Literal) else values[atom, rows]


def _computed(
    step: Step, division: Division, values: Mapping[Key, Any], tokens: Any
) -> Sequence[Any]:
    """Return the results of an equation for some tokens."""
    eqn, name, flow = step.unit.eqn, step.unit.eqn.primitive.name, step.flow
    operands = [_read(values, end) for end in step.operands]
    if any(place is not None for place in flow.places):
        operands[1] = _within_chunk(operands[1], flow)
    if flow.result is None or name == "pad" or step.rule:
        filling = operands[1] if name == "pad" else 0
        for i, (_, rows) in enumerate(step.operands):
            if rows is not None and not division.is_whole(rows):
                here = _present(operands[i], rows, tokens)
                operands[i] = jnp.where(here, operands[i], jnp.asarray(filling, operands[i].dtype))
    if step.rule:
        return _by_rule(step.rule, len(eqn.outvars), division, operands, tokens)
    if name == "reshard":
        return operands  # of all tokens, as are the shardings of other equations on such a mesh
    params = resized(eqn, flow, len(tokens))
    if jax_compat.has_typed_sharding(eqn.outvars[0].aval):
        params |= {name: None for name, p in eqn.params.items() if isinstance(p, NamedSharding)}
    if name == "dot_general":
        contracted, batch = eqn.params["dimension_numbers"]
        sides = zip(contracted, step.operands, step.unit.ins, strict=True)
        lying = (axes if own == a else tuple(1 - i for i in axes) for axes, (own, _), a in sides)
        params["dimension_numbers"] = tuple(lying), batch
    return jax_compat.bind(eqn, operands, **params)


def _by_rule(
    rule: Rule, count: int, division: Division, operands: Sequence[Any], tokens: Any
) -> list[Any]:
    """Return the results of a function with a derivative of its own, which keeps that."""

    def run(made: Pass, given: Sequence[Any], tokens: Any) -> list[Any]:
        found = in_chunk(made, division, dict(zip(made.inputs, given, strict=True)), tokens)
        return [_read(found, end) for end in made.exits]

    def forward(tokens: Any, *operands: Any) -> tuple[list[Any], Any]:
        results = run(rule.forward, operands, tokens)
        return results[:count], (tokens, results[count:])

    def backward(saved: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        tokens, kept = saved[0], iter(saved[1])
        given = [cotangents[i] if i < count else next(kept) for i, _ in rule.backward.inputs]
        pulled = dict(zip(rule.moving, run(rule.backward, given, tokens), strict=True))
        return None, *(pulled.get(i) for i, _ in rule.forward.inputs)

    value = jax.custom_vjp(lambda *given: forward(*given)[0])
    value.defvjp(forward, backward)
    return value(tokens, *operands)


def _present(array: Any, rows: Rows, tokens: Any) -> Any:
    """Return which rows of a chunk are those of tokens that an array of the program has."""
    here = (tokens >= rows.start) & (tokens < rows.start + rows.length)
    spread = jnp.broadcast_to(here[:, None], (rows.outer, len(here), rows.inner)).reshape(-1)
    return lax.broadcast_in_dim(spread, array.shape, (rows.axis,))


def _within_chunk(indices: Any, flow: Flow) -> Any:
    """Return indices that count the tokens of a chunk where they count all."""
    rows, last = flow.operands[1], indices.ndim - 1
    number = lax.broadcasted_iota(jnp.int32, indices.shape, last)
    for i, place in enumerate(flow.places):
        if rows is not None and place == rows.axis:
            own = lax.broadcasted_iota(indices.dtype, indices.shape, rows.axis)
            indices = jnp.where(number == i, own, indices)
    return indices
