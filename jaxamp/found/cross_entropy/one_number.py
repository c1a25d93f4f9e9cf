"""Compute a loss that is one number and its gradients in one pass, where it is differentiated.

A cotangent of one number multiplies all gradients, so they are known before it is. That takes three
products, where logits that are computed again for the backward pass take four.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxamp.core import jax_compat
from jaxamp.found.cross_entropy.chunks import Division, as_written, in_chunk, looped, zeros
from jaxamp.found.cross_entropy.passes import Key, Pass
from jaxamp.found.cross_entropy.read_anew import read_anew
from jaxamp.found.levels import Level, numbers


def one_number(made: Pass, level: Level) -> int | None:
    """Return the one result of a pass that has a derivative, if that is a number."""
    moving = {value for value, _ in made.inputs if value in level.moving}
    for step in made.steps.values():
        if step.rule is not None and not step.rule.is_linear:
            return None
        if not moving.isdisjoint(numbers(atom for atom, _ in step.operands)):
            outs = step.unit.outs
            moved = outs if step.rule is None else step.rule.moved(outs)
            moving.update(level.moving.intersection(moved))
    results = [(value, rows) for value, rows in made.outputs.items() if value in moving]
    is_number = len(results) == 1 and not level.avals[results[0][0]].shape
    return results[0][0] if is_number and results[0][1] is None else None


def differentiated(
    made: Pass, division: Division, read: Callable[[int], Any], number: int
) -> dict[int, Any]:
    """Return what a pass makes; the gradients of the `one_number` of it are computed with it."""
    values = [*dict.fromkeys(value for value, _ in made.inputs)]
    order = [*made.outputs]

    @jax.custom_jvp
    def total(*arrays: Any) -> list[Any]:
        given = dict(zip(values, arrays, strict=True))
        results = as_written(made, division, given.__getitem__, again=False)
        return [results[value] for value in order]

    @functools.partial(total.defjvp, symbolic_zeros=True)
    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        given = zip(values, tangents, strict=True)
        moving = {value: t for value, t in given if not jax_compat.is_symbolic_zero(t)}

        def passed(loop: Any, *arrays: Any) -> Any:
            given = dict(zip(values, arrays, strict=True))
            return _with_gradients(made, division, given, number, [*moving], loop)

        once = jax.custom_jvp(functools.partial(passed, _scanned))
        once.defjvp(functools.partial(jax.jvp, functools.partial(passed, lax.scan)))
        results, gradients = once(*primals)
        moved = jnp.stack([_along(gradients[value], moving[value]) for value in moving])
        still = dict(jax.custom_derivatives.zero_from_primal(results))
        still[number] = _along(jnp.ones_like(moved), moved)  # `sum` would be a fused group
        return [results[value] for value in order], [still[value] for value in order]

    return dict(zip(order, total(*map(read, values)), strict=True))


def _along(gradient: Any, tangent: Any) -> Any:
    """Return their product, which no policy rounds."""
    axes = tuple(range(gradient.ndim))
    numbers, precision = ((axes, axes), ((), ())), lax.Precision.HIGHEST
    return lax.dot_general(gradient, tangent, numbers, precision=precision)


def _with_gradients(
    made: Pass,
    division: Division,
    given: dict[int, Any],
    number: int,
    wanted: list[int],
    loop: Any,
) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return what a pass makes, and the gradients of a number among it along some inputs."""
    along = [key for key in made.inputs if key[0] in wanted]
    wholes = {key: given[key[0]] for key in along if key[1] is None}
    sums = {key: zeros(array.shape, jax.typeof(array)) for key, array in wholes.items()}

    @functools.partial(read_anew, in_rows=division.in_rows, slices=division.slices)
    def body(env: Mapping[Key, Any], tokens: Any) -> dict[Key, Any]:
        def one(moving: Any) -> tuple[Any, dict[Key, Any]]:
            found = in_chunk(made, division, {**env, **moving}, tokens)
            return found[number, None], found

        total, pull, found = jax.vjp(one, {key: env[key] for key in along}, has_aux=True)
        return found | pull(jnp.ones_like(total))[0]

    found = looped(made, division, given.__getitem__, body, sums, loop)
    results = {value: found[value, rows] for value, rows in made.outputs.items()}
    parts = {value: [found[key] for key in along if key[0] == value] for value in wanted}
    return results, {value: functools.reduce(jnp.add, found) for value, found in parts.items()}


def _scanned(body: Callable[..., tuple[Any, Any]], start: Any, parts: Any) -> tuple[Any, Any]:
    """Return what `lax.scan` returns, from a loop out of which nothing is moved, nor transposed.

    Where JAX differentiates around a scan, it moves what is the same in every step before it, as
    zeros and numbers of words, which are as large as the logits of a chunk (JAX 0.10.2).
    """

    def part(index: Any) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, 0, False), parts)

    def step(state: Any) -> Any:
        index, carry, stacks = state
        carry, rows = body(carry, part(index))
        put = functools.partial(lax.dynamic_update_index_in_dim, index=index, axis=0)
        return index + 1, carry, jax.tree.map(put, stacks, rows)

    index = jnp.zeros((), jnp.int32)
    (count,) = {len(x) for x in jax.tree.leaves(parts)}
    rows = jax.make_jaxpr(lambda: body(start, part(index))[1], return_shape=True)()
    avals = jax.tree.unflatten(jax.tree.structure(rows[1]), rows[0].out_avals)
    stacks = jax.tree.map(lambda aval: zeros((count, *aval.shape), aval), avals)
    return lax.while_loop(lambda state: state[0] < count, step, (index, start, stacks))[1:]
