"""Emit a level with its attentions as single equations."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from jaxamp.attention.empty_rows import VANISHING, EmptyRows
from jaxamp.attention.levels import Atom, Level, Unit, live_from
from jaxamp.attention.match import Bias, Found, Masking, NotAttention, Rescaling
from jaxamp.attention.scores import LEAST, Scores
from jaxamp.attention.values import Axis, Factor, Place, size_of
from jaxamp.core import jax_compat
from jaxamp.jaxprs.interpret import bind_nested
from jaxamp.kernels.attention.found import found_attention, found_attention_backward
from jaxamp.kernels.attention.spec import AttentionSpec


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


@dataclass(slots=True, eq=False)
class Replacement:
    """An attention with all that is needed to emit it.

    Attributes:
      found: the attention.
      layout: how its axes are those of the kernels.
      spec: the parameters of the kernels.
      steps: what is done to the scores beside those.
      bias_shape: shape of the sum of the steps; ``None`` where there are none.
      is_sure: whether no row is masked whole.
    """

    found: Found
    layout: Layout
    spec: AttentionSpec
    steps: list[Bias | Masking | Rescaling]
    bias_shape: tuple[int, ...] | None
    is_sure: bool


def layout_of(found: Found, scores: Scores, ordered: Sequence[Axis]) -> Layout:
    """Choose which axes are batch, heads, queries and keys.

    Args:
      found: the attention.
      scores: the values of the level.
      ordered: axes that masks tell apart, which are no heads.
    """
    alone = [a for a in _order(found.q) if a in found.alone]
    if not alone:
        raise NotAttention("there is one query for all keys")
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


def arranged(array: Any, places: Sequence[Place], wanted: Sequence[Place]) -> Any:
    """Return an array with axes in other places: summed over those not wanted, or repeated."""
    have = list(itertools.chain.from_iterable(places))
    want = list(itertools.chain.from_iterable(wanted))
    array = _reshaped(array, [a.size for a in have])
    gone = [i for i, a in enumerate(have) if a not in want]
    if gone:
        array = jnp.sum(array, axis=tuple(gone))
        have = [a for a in have if a in want]
    order = [have.index(a) for a in want if a in have]
    if order != sorted(order):
        array = jnp.transpose(array, order)
    if len(order) < len(want):
        array = _reshaped(array, [a.size if a in have else 1 for a in want])
        array = jnp.broadcast_to(array, [a.size for a in want])
    return _reshaped(array, [size_of(p) for p in wanted])


def _reshaped(array: Any, shape: Sequence[int]) -> Any:
    return array if tuple(array.shape) == tuple(shape) else jnp.reshape(array, shape)


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


class Binding(Protocol):
    """Emission of units that change together, one after the other."""

    def emit(self, emitter: Emitter, unit: Unit) -> Sequence[Any]:
        """Emit one of the units; of its results those that nobody reads are ``None``."""
        ...


@dataclass(slots=True)
class Changes:
    """Changes of a level.

    Attributes:
      scores: the values of the level.
      replacements: attentions that become single equations.
      bodies: other jaxprs of loops, branches and the like.
      bindings: units that are emitted by something else.
    """

    scores: Scores
    replacements: Sequence[Replacement]
    bodies: Mapping[Unit, list[ClosedJaxpr]]
    bindings: Mapping[Unit, Binding]

    @property
    def any(self) -> bool:
        """Return whether anything changes."""
        return bool(self.replacements or self.bodies or self.bindings)


class Emitter:
    """Emission of one level, or of a part of it.

    Attributes:
      env: the values that have been emitted.
      handed: what the first unit of a binding leaves to the next.
      forwards: output and bits of the attentions that have been emitted.
      live: values that units which stay read, or the level returns.
      units: units that stay.
      held: per value that holds a result of an attention: that, the result, and how it is held.
    """

    def __init__(self, level: Level, changes: Changes) -> None:
        self.level, self.changes, self.scores = level, changes, changes.scores
        self.env: dict[int, Any] = dict(level.constants)
        self.handed: dict[Binding, Any] = {}
        self.forwards: dict[Replacement, Any] = {}
        self._backwards: dict[Replacement, Any] = {}
        self._operands: dict[Replacement, Any] = {}
        self._outs: dict[Replacement, Any] = {}
        self._empty: dict[Replacement, EmptyRows] = {}
        self._masked: dict[Replacement, Any] = {}
        replacements = changes.replacements
        cut = frozenset().union(*(r.found.cut for r in replacements))
        self._needed: set[int] = set().union(*(needed(self.scores, r) for r in replacements))
        exits = {a for a in level.exits if isinstance(a, int)}
        self.units = live_from(level, (exits | self._needed) - cut, cut)
        self._before = live_from(level, exits, frozenset())
        self.live = exits | {a for u in self.units for a in u.ins if isinstance(a, int)}
        self.held: dict[int, tuple[Replacement, str, Any]] = {
            h.value: (r, n, h)
            for r in replacements
            for n, hs in r.found.results.items()
            for h in hs
        }

    def read(self, atom: Atom) -> Any:
        """Return a value that has been emitted."""
        return jax_compat.literal_value(atom) if isinstance(atom, Literal) else self.env[atom]

    def array(self, factor: Factor) -> tuple[Any, tuple[Place, ...]]:
        """Return the array of a tensor, and its axes."""
        base = self.scores.algebra.bases[factor.base]
        if base.kind == "leaf":
            return self.env[base.data], factor.places
        value, form = self.scores.homes[factor.base]
        ((own, number),) = [form.single]  # type: ignore[misc]
        inside = dict(zip(own.places, factor.places, strict=True))
        parts = {a: inside[(a,)] for a in form.axes}
        places = tuple(tuple(b for a in p for b in parts[a]) for p in form.places)
        array = self.env[value]
        return (array if number == 1 else array * (1 / number)), places

    def operands(self, r: Replacement) -> list[Any]:
        """Return q, k, v and the bias."""
        if r not in self._operands:
            layout = r.layout
            q, k, v = (
                arranged(*self.array(f), places)
                for f, places in (
                    (r.found.q, layout.q),
                    (r.found.k, layout.k),
                    (r.found.v, layout.v),
                )
            )
            bias = self.bias(r)
            if r.is_sure and any(isinstance(step, Bias) for step in r.steps):
                bias = _near_zero(bias, r.spec.seen(q.shape[-3], k.shape[-3]))
            if not r.is_sure:
                self._empty[r], bias = self._without_empty_rows(r, q, bias)
                q = self._empty[r].given
            self._operands[r] = [q, k, v, bias]
        return self._operands[r]

    def _without_empty_rows(self, r: Replacement, q: Any, bias: Any) -> tuple[EmptyRows, Any]:
        """Return the rows that see nothing, and a bias that is zero there."""
        has_bias = any(isinstance(step, Bias) for step in r.steps)
        masks = [step for step in r.steps if isinstance(step, Masking)]
        seen = [self.mask(r, step) for step in masks]
        every = functools.reduce(jnp.logical_and, seen) if seen else None
        top = lax.stop_gradient(jnp.max(bias, axis=-1, keepdims=True))
        masked = infinite = vanished = flat = None
        if every is not None:
            masked = ~jnp.any(every, axis=-1, keepdims=True)
            self._masked[r] = masked
        if masked is not None and any(step.number == -np.inf for step in masks):
            infinite = masked & (top == -np.inf)
            top = jnp.where(infinite, 0.0, top)
            bias = jnp.where(infinite, 0.0, bias)
        if has_bias:
            vanished = top <= VANISHING
            flat = vanished & (lax.stop_gradient(jnp.min(bias, axis=-1, keepdims=True)) == top)
            flat = flat if every is None else flat & jnp.all(every, axis=-1, keepdims=True)
        rows = [None if x is None else self._rows(r, x) for x in (masked, infinite, vanished, flat)]
        return EmptyRows(q, *rows), jnp.where(top <= LEAST, bias - top, bias)

    def _rows(self, r: Replacement, rows: Any) -> Any:
        """Return a number of each row of scores beside the queries."""
        layout = r.layout
        have = [p if n != 1 else () for p, n in zip(layout.scores, rows.shape, strict=True)]
        return arranged(rows, have, [tuple(a for a in p if a not in layout.head) for p in layout.q])

    def mask(self, r: Replacement, step: Masking) -> Any:
        """Return where scores stay as they are."""
        array, places = self.array(step.factor)
        mask = thin(array, places, r.layout.scores)
        return mask if step.sign else ~mask

    def bias(self, r: Replacement) -> Any:
        """Return what the kernel adds to scores."""
        if r.bias_shape is None:
            return None
        total: Any = jnp.zeros((1,) * len(r.bias_shape), jnp.float32)
        for step in r.steps:
            if isinstance(step, Bias):
                array, places = self.array(step.factor)
                added = thin(array, places, r.layout.scores)
                total = total + added.astype(jnp.float32) * step.times
            elif isinstance(step, Masking):
                low = jnp.asarray(step.number, jnp.float32)
                total = jnp.where(self.mask(r, step), total, low)
            else:
                total = total * step.times
        return total

    def result(self, r: Replacement, name: str) -> tuple[Any, tuple[Place, ...]]:
        """Return a result of an attention, and its axes."""
        layout = r.layout
        if r not in self.forwards:
            q, k, v, bias = self.operands(r)
            self.forwards[r] = found_attention(q, k, v, bias, r.spec)
        out, bits = self.forwards[r]
        if name == "out":
            if r not in self._outs:
                self._outs[r] = self._completed(r, out)
            return self._outs[r], layout.out
        if r not in self._backwards:
            self._backwards[r] = self._backward(r, out, bits)
        dq, dk, dv, *dbias = self._backwards[r]
        if name.startswith("dbias"):
            return dbias[0], thinned_to(layout.scores, r.bias_shape or ())
        places = {"dq": layout.q, "dk": layout.k, "dv": layout.v}[name]
        return {"dq": dq, "dk": dk, "dv": dv}[name], places

    def _completed(self, r: Replacement, out: Any) -> Any:
        """Return the output of the program from that of a kernel."""
        if r.is_sure:
            return out
        _, k, v, _ = self.operands(r)
        return self._empty[r].completed(out, k, v, r.spec.scale)

    def _backward(self, r: Replacement, out: Any, bits: Any) -> list[Any]:
        assert r.found.dout is not None
        q, k, v, bias = self.operands(r)
        dout = arranged(*self.array(r.found.dout), r.layout.out)
        bias_grad = any(name.startswith("dbias") for name in self.wanted(r))
        rows = self._empty.get(r, EmptyRows(q))
        more: Any = None
        if not rows.is_complete:
            _, pull = jax.vjp(lambda o, k, v: rows.completed(o, k, v, r.spec.scale), out, k, v)
            dout, *more = pull(dout)
        dq, dk, dv, *dbias = found_attention_backward(
            q, k, v, bias, out, bits, dout, r.spec, bias_grad
        )
        if more:
            dk, dv = dk + more[0], dv + more[1]
        if rows.masked is not None:
            dq = jnp.where(rows.masked, jnp.zeros((), dq.dtype), dq)
            dbias = [jnp.where(self._masked[r], jnp.zeros((), x.dtype), x) for x in dbias]
        return [dq, dk, dv, *dbias]

    def wanted(self, r: Replacement) -> list[str]:
        """Return the names of the results that are needed."""
        return [n for n, held in r.found.results.items() if any(h.value in self.live for h in held)]

    def emit(self, args: Sequence[Any]) -> list[Any]:
        """Emit the level."""
        self.env.update(zip(self.level.entries, args, strict=True))
        self.run(self.level.units)
        return [self.read(a) for a in self.level.exits]

    def run(self, units: Sequence[Unit]) -> None:
        """Emit units, and results of attentions where the program has them."""
        for unit in units:
            if unit.inside is not None and not unit.is_whole:
                self._call(unit)
                continue
            if unit in self.units:
                with jax_compat.emitting(unit.eqn):
                    self.bind(unit)
            for value in unit.outs:
                if isinstance(value, int) and value in self.held and value in self.live:
                    with jax_compat.emitting(unit.eqn):
                        self.env[value] = self.holding(value)

    def holding(self, value: int) -> Any:
        """Return a value of the program that holds a result of an attention."""
        return self._held(*self.held[value])

    def _held(self, r: Replacement, name: str, held: Any) -> Any:
        result, places = self.result(r, name)
        times = (
            held.times
            if name in ("out", "dv") or name.startswith("dbias")
            else held.times / r.spec.scale
        )
        array = arranged(result, places, held.places)
        aval = self.level.avals[held.value]
        array = array if abs(times - 1) < 1e-5 else array * jnp.asarray(times, array.dtype)
        return array.astype(aval.dtype)

    def _call(self, unit: Unit) -> None:
        if self.is_opened(unit):
            with jax_compat.emitting(unit.eqn):
                self.run(unit.inside or ())
        elif self.is_bound(unit):
            with jax_compat.emitting(unit.eqn):
                self.bind(unit)

    def is_bound(self, unit: Unit) -> bool:
        """Return whether a call has anything that stays."""
        inner = list(_leaves(unit))
        return any(u in self.units for u in inner) or any(
            a in self.held and a in self.live for u in inner for a in u.outs if isinstance(a, int)
        )

    def is_opened(self, unit: Unit) -> bool:
        """Return whether anything changes in a call, so that its equations are emitted alone."""
        outs = {a for a in unit.outs if isinstance(a, int)}
        return self.is_bound(unit) and any(
            (u in self.units) != (u in self._before)
            or u in self.changes.bodies
            or u in self.changes.bindings
            or any(
                isinstance(a, int) and (a in self.held or (a in self._needed and a not in outs))
                for a in u.outs
            )
            for u in _leaves(unit)
        )

    def bind(self, unit: Unit) -> None:
        """Emit an equation, or a call as a whole."""
        if unit in self.changes.bindings:
            results = self.changes.bindings[unit].emit(self, unit)
        elif unit in self.changes.bodies:
            operands = [self.read(a) for a in unit.ins]
            results = bind_nested(unit.eqn, operands, self.changes.bodies[unit])
        else:
            results = jax_compat.bind(unit.eqn, [self.read(a) for a in unit.ins])
        for atom, result in zip(unit.outs, results, strict=True):
            if isinstance(atom, int) and result is not None:
                self.env.setdefault(atom, result)


def _near_zero(bias: Any, seen: Any) -> Any:
    """Return a bias less the largest of each row, so that 16 bits round it least where it counts.

    Args:
      bias: what is added to scores.
      seen: bool[T, S], which of them are.
    """
    if seen is None:
        top = jnp.max(bias, axis=-1, keepdims=True)
    elif bias.shape[-2] == seen.shape[0]:
        top = jnp.max(jnp.where(seen, bias, -jnp.inf), axis=-1, keepdims=True)
    else:
        return bias  # its rows see different keys
    return bias - lax.stop_gradient(top)


def _leaves(unit: Unit) -> Iterable[Unit]:
    for inner in unit.inside or ():
        if inner.inside is None or inner.is_whole:
            yield inner
        else:
            yield from _leaves(inner)


def _factors(replacement: Replacement) -> list[Factor]:
    found = replacement.found
    factors = [found.q, found.k, found.v]
    factors += [found.dout] if found.dout is not None else []
    return factors + [s.factor for s in replacement.steps if not isinstance(s, Rescaling)]


def needed(scores: Scores, replacement: Replacement) -> set[int]:
    """Return the values of the program that an attention reads."""
    homes = (home_of(scores, f) for f in _factors(replacement))
    return {home for home in homes if home is not None}


def home_of(scores: Scores, factor: Factor) -> int | None:
    """Return the value of the program that holds a tensor."""
    base = scores.algebra.bases[factor.base]
    if base.kind == "leaf":
        return base.data if isinstance(base.data, int) else None
    home = scores.homes.get(factor.base)
    return home[0] if home else None


def emit_level(level: Level, changes: Changes) -> ClosedJaxpr:
    """Return the jaxpr of a level with its changes."""

    def emitted(*args: Any) -> list[Any]:
        return Emitter(level, changes).emit(args)

    jaxpr = level.closed.jaxpr
    return jax_compat.trace_to_jaxpr(emitted, level.closed.in_avals, jaxpr.debug_info)
