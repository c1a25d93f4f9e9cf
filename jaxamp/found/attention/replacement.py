"""An attention that becomes one equation: its operands, its forward and its backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxamp.core import jax_compat
from jaxamp.core.features import Outcome
from jaxamp.found.attention.empty_rows import VANISHING, EmptyRows
from jaxamp.found.attention.kernels import primitives
from jaxamp.found.attention.kernels.spec import AttentionSpec, Operands
from jaxamp.found.attention.layout import Layout, arranged, thin, thinned, thinned_to
from jaxamp.found.attention.match import Bias, Found, Held, Masking, Step
from jaxamp.found.attention.scores import Scores
from jaxamp.found.levels import Unit
from jaxamp.found.places import words_of
from jaxamp.found.values import Factor, Place, divided, size_of

Placed = tuple[Any, Sequence[Place]]
"""An array, and the axes that it has in each place."""


KIND = "attention"


@dataclass(eq=False)
class Replacement:
    """An attention with all that is needed to emit it."""

    unit: Unit  # the exponential
    found: Found
    layout: Layout
    spec: AttentionSpec
    scores: Scores
    steps: list[Step]  # what is done to the scores beside what the kernels do
    is_sure: bool  # that no row is masked whole
    is_zeroed: bool  # whether weights of such a row are zeros, as they are masked again
    handed: ClassVar[int] = 2  # output and bits

    @property
    def outcome(self) -> Outcome:
        """The words of reports."""
        found = self.found
        return Outcome(KIND, *words_of(self.unit), "", "out" in found.results, found.backward)

    @property
    def made(self) -> frozenset[int]:
        """The values of the program that hold results."""
        return frozenset(self.held)

    @functools.cached_property
    def needed(self) -> frozenset[int]:
        """The values of the program that it reads."""
        homes = map(self.scores.home, (*self.found.operands, *self.added))
        return frozenset(home for home in homes if home is not None)

    @property
    def added(self) -> list[Factor]:
        """Biases and masks."""
        return [step.factor for step in self.steps]

    @functools.cached_property
    def bias_shape(self) -> tuple[int, ...] | None:
        """The shape of the sum of biases and masks; ``None`` where there are none."""
        thin = (thinned(factor.places, self.layout.scores) for factor in self.added)
        shapes = [map(size_of, places) for places in thin]
        return tuple(map(max, zip(*shapes, strict=True))) if shapes else None

    def types(self, dtype: Any) -> Operands:
        """Return the types of what a kernel is given."""
        layout, shape = self.layout, self.bias_shape
        q, k, v = (
            jax.ShapeDtypeStruct([size_of(p) for p in places], dtype)
            for places in (layout.q, layout.k, layout.v)
        )
        return Operands(q, k, v, shape and jax.ShapeDtypeStruct(shape, np.float32))

    @functools.cached_property
    def held(self) -> dict[int, tuple[str, Held]]:
        """Per value that holds a result: which one, and how."""
        results = self.found.results.items()
        return {held.value: (name, held) for name, all_held in results for held in all_held}

    def follows(self, value: int, *, operands: bool) -> bool:
        """Return whether a value is the output, made of what a kernel returned.

        Of rows that may see nothing it is made from operands.
        """
        return self.held[value][0] == "out" and (self.is_sure or operands)

    def emission(self, read: Callable[[int], Any], wanted: set[int]) -> Emission:
        """Return what emits it."""
        held = self.held.items()
        bias_grad = any(v in wanted for v, (name, _) in held if name.startswith("dbias"))
        return Emission(self, read, bias_grad=bias_grad)

    def lies_alike(self) -> bool:
        """Return whether the types of a mesh let it be computed, with the program's results."""
        avals, needed, made = self.scores.level.avals, sorted(self.needed), sorted(self.made)
        if not any(jax_compat.has_typed_sharding(avals[v]) for v in needed):
            return True

        def emitted(*arrays: Any) -> list[Any]:
            emission = self.emission(dict(zip(needed, arrays, strict=True)).__getitem__, set(made))
            return [emission.value(v) for v in made]

        def both(*arrays: Any) -> list[Any]:
            out, pull = jax.vjp(emitted, *arrays)
            pull(out)
            return out

        way = emitted if self.found.backward else both
        return jax_compat.sharded_alike(way, [avals[v] for v in needed], [avals[v] for v in made])


class _Prepared(NamedTuple):
    """Operands of a kernel, and the rows of scores that see nothing."""

    operands: Operands
    rows: EmptyRows
    masked: Any = None  # those that masks hide whole, beside the scores


class Emission:
    """Emission of one attention; whatever it is asked for is emitted once."""

    def __init__(
        self, replacement: Replacement, read: Callable[[int], Any], *, bias_grad: bool
    ) -> None:
        self.replacement, self.layout = replacement, replacement.layout
        self._read, self._bias_grad = read, bias_grad

    def _array(self, factor: Factor) -> Placed:
        scores = self.replacement.scores
        base = scores.algebra.bases[factor.base]
        if base.kind == "leaf":
            return self._read(base.data), factor.places
        value, form = scores.homes[factor.base]
        ((own, number),) = [form.single]  # type: ignore[misc]
        inside = dict(zip(own.places, factor.places, strict=True))
        parts = {a: inside[(a,)] for a in form.axes}
        array = self._read(value)
        return (array if number == 1 else array * (1 / number)), divided(form.places, parts)

    def value(self, value: int) -> Any:
        """Return a multiple of a result, as the program holds it."""
        name, held = self.replacement.held[value]
        result, places = self._result(name)
        times = held.times
        if name in ("dq", "dk"):  # those of a kernel have its scale
            times /= self.replacement.spec.scale
        array = arranged(result, divided(places, held.parts), held.places)
        return array if abs(times - 1) < 1e-5 else array * jnp.asarray(times, array.dtype)

    def _result(self, name: str) -> Placed:
        layout = self.layout
        if name == "out":
            return self._out, layout.out
        dq, dk, dv, *dbias = self._cotangents
        if name.startswith("dbias"):
            return dbias[0], thinned_to(layout.scores, self.replacement.bias_shape or ())
        return {"dq": (dq, layout.q), "dk": (dk, layout.k), "dv": (dv, layout.v)}[name]

    @functools.cached_property
    def forward(self) -> list[Any]:
        """Output and bits of the kernel."""
        return primitives.forward(self._prepared.operands, self.replacement.spec)

    @functools.cached_property
    def _out(self) -> Any:
        """Output of the program, which may have rows that see nothing."""
        out, _ = self.forward
        if self.replacement.is_sure:
            return out
        operands, rows, _ = self._prepared
        return rows.completed(out, operands.k, operands.v, self.replacement.spec.scale)

    @functools.cached_property
    def _cotangents(self) -> list[Any]:
        found, spec = self.replacement.found, self.replacement.spec
        assert found.dout is not None
        out, bits = self.forward
        operands, rows, masked = self._prepared
        dout = arranged(*self._array(found.dout), self.layout.out)
        more: Any = None
        if not rows.is_complete:
            _, pull = jax.vjp(
                lambda o, k, v: rows.completed(o, k, v, spec.scale), out, operands.k, operands.v
            )
            dout, *more = pull(dout)
        given = operands._replace(out=out, lse=bits, dout=dout)
        dq, dk, dv, *dbias = primitives.backward(given, spec, self._bias_grad)
        if more:
            dk, dv = dk + more[0], dv + more[1]
        if rows.masked is not None:
            dq = jnp.where(rows.masked, jnp.zeros((), dq.dtype), dq)
            dbias = [jnp.where(masked, jnp.zeros((), x.dtype), x) for x in dbias]
        return [dq, dk, dv, *dbias]

    @functools.cached_property
    def _prepared(self) -> _Prepared:
        replacement, layout, found = self.replacement, self.layout, self.replacement.found
        q = arranged(*self._array(found.q), layout.q)
        k = arranged(*self._array(found.k), layout.k)
        v = arranged(*self._array(found.v), layout.v)
        bias = self._bias()
        if not replacement.is_sure:
            return self._without_empty_rows(q, k, v, bias)
        if any(isinstance(step, Bias) for step in replacement.steps):
            bias = _near_zero(bias, replacement.spec.seen(q.shape[-3], k.shape[-3]))
        return _Prepared(Operands(q, k, v, bias), EmptyRows(q))

    def _without_empty_rows(self, q: Any, k: Any, v: Any, bias: Any) -> _Prepared:
        """Return queries and a bias that are zero in rows that see nothing, and these rows."""
        steps = self.replacement.steps
        masks = [step for step in steps if isinstance(step, Masking)]
        seen = [self._mask(step) for step in masks]
        every = functools.reduce(jnp.logical_and, seen) if seen else None
        top = lax.stop_gradient(jnp.max(bias, axis=-1, keepdims=True))
        masked = infinite = vanished = flat = None
        if every is not None:
            masked = ~jnp.any(every, axis=-1, keepdims=True)
        if masked is not None and any(step.number == -np.inf for step in masks):
            infinite = masked & (top == -np.inf)
            top = jnp.where(infinite, 0.0, top)
            bias = jnp.where(infinite, 0.0, bias)
        if any(isinstance(step, Bias) for step in steps):
            vanished = top <= VANISHING
            flat = vanished & (lax.stop_gradient(jnp.min(bias, axis=-1, keepdims=True)) == top)
            flat = flat if every is None else flat & jnp.all(every, axis=-1, keepdims=True)
        kinds = masked, infinite, vanished, flat
        beside = (None if x is None else self._beside_queries(x) for x in kinds)
        rows = EmptyRows(q, *beside, is_zeroed=self.replacement.is_zeroed)
        return _Prepared(Operands(rows.given, k, v, bias - top), rows, masked)

    def _beside_queries(self, rows: Any) -> Any:
        """Return a number of each row of scores beside the queries."""
        have = thinned_to(self.layout.scores, rows.shape)
        return arranged(rows, have, (*self.layout.q[:-1], ()))

    def _mask(self, step: Masking) -> Any:
        """Return where scores stay as they are."""
        mask = thin(*self._array(step.factor), self.layout.scores).astype(bool)
        return mask if step.sign else ~mask

    def _bias(self) -> Any:
        shape = self.replacement.bias_shape
        if shape is None:
            return None
        total: Any = jnp.zeros((1,) * len(shape), jnp.float32)
        for step in self.replacement.steps:
            if isinstance(step, Bias):
                added = thin(*self._array(step.factor), self.layout.scores)
                total = total + added.astype(jnp.float32) * step.number
            else:
                low = jnp.asarray(step.number, jnp.float32)
                total = jnp.where(self._mask(step), total, low)
        return total


def _near_zero(bias: Any, seen: Any) -> Any:
    """Return a bias less the largest seen of each row, so that 16 bits round that least."""
    if seen is None:
        top = jnp.max(bias, axis=-1, keepdims=True)
    elif bias.shape[-2] == seen.shape[0]:
        top = jnp.max(jnp.where(seen, bias, -jnp.inf), axis=-1, keepdims=True)
    else:
        return bias  # its rows see different keys
    return bias - lax.stop_gradient(top)
