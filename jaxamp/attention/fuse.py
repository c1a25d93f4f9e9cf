"""Replace attentions in a program by single equations, where a kernel takes them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxamp.attention.apart import softmaxes_apart
from jaxamp.attention.emit_level import Binding, Changes, emit_level
from jaxamp.attention.known_numbers import Given, KnownNumbers, Outer
from jaxamp.attention.layout import layout_of, thinned
from jaxamp.attention.levels import Level, Unit, numbers, open_level
from jaxamp.attention.masks import Kinds, kinds_of, known_masks
from jaxamp.attention.match import (
    NO_PRODUCT,
    Bias,
    Found,
    Masking,
    Matcher,
    Obstacle,
    Rescaling,
    kept_beside,
    weights_of,
)
from jaxamp.attention.outcome import Attention, RefusedAttention
from jaxamp.attention.pairs import Together, join, pairs_of
from jaxamp.attention.replacement import Replacement, home_of, needed
from jaxamp.attention.scores import Scores
from jaxamp.attention.slopes import has_slope
from jaxamp.attention.softmaxes import Softmaxes
from jaxamp.attention.values import size_of
from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.core.keep_precision import kept_precision
from jaxamp.core.taxonomy import OpKind
from jaxamp.jaxprs.explicit_precision import EXPLICIT_PRECISION, has_explicit_precision
from jaxamp.jaxprs.name_stack import clean_scope, functions_around, joined_scope
from jaxamp.jaxprs.nested import Wiring, loop, nested, wiring
from jaxamp.jaxprs.shared_rules import share_rules
from jaxamp.kernels.attention.bias_bytes import Biased
from jaxamp.kernels.attention.fused import Fused as Kernel
from jaxamp.kernels.attention.platforms import at_hand, everywhere
from jaxamp.kernels.attention.refusal import refusal
from jaxamp.kernels.attention.spec import AttentionSpec
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.policy.rules import EquationView, first_match

_NARROW = (Precision.BF16, Precision.F16)
_SLOPE = Obstacle("keys share numbers of a bias, whose gradient nearly cancels: 16 bits lose it")
_ENTERED = (Wiring.CALL, Wiring.BRANCHES, Wiring.SCAN, Wiring.WHILE)


class Fused(NamedTuple):
    """A program with attentions as single equations.

    Attributes:
      jaxpr: the program; the same object where there are none.
      attentions: those.
      refused: what looks like attention and stays as it is.
    """

    jaxpr: ClosedJaxpr
    attentions: tuple[Attention, ...] = ()
    refused: tuple[RefusedAttention, ...] = ()


def fuse_attention(closed: ClosedJaxpr, policy: PrecisionPolicy) -> Fused:
    """Return a program with its attentions as single equations.

    Args:
      closed: the program, in float32.
      policy: the policy that it will run under.

    >>> import jax.numpy as jnp
    >>> def attend(q, k, v):
    ...     return jax.nn.softmax(q @ k.T) @ v
    >>> x = jnp.ones((64, 64))
    >>> policy = PrecisionPolicy.MIXED_BF16.replace(fused_attention=True)
    >>> fused = fuse_attention(jax.make_jaxpr(attend)(x, x, x), policy)
    >>> [eqn.primitive.name for eqn in fused.jaxpr.eqns if "attention" in eqn.primitive.name]
    ['found_attention']
    """
    kernels = _kernels(policy)
    if not kernels or closed.jaxpr not in Softmaxes():
        return Fused(closed)
    fuser = _Fuser(policy, kernels)
    changed = fuser.level(closed, {}, "")
    if changed is not closed:
        changed = share_rules(changed)
    return Fused(changed, tuple(fuser.attentions), tuple(fuser.refused))


def _kernels(policy: PrecisionPolicy) -> list[Kernel]:
    """Return the kernels that an attention may be replaced for."""
    if policy.base not in _NARROW or policy.fused_attention is False:
        return []
    if policy.fused_attention:
        return everywhere()
    return [] if _quantizes_attention(policy) else at_hand()


def _quantizes_attention(policy: PrecisionPolicy) -> bool:
    """Return whether products of activations are quantized, which no kernel here does."""
    return policy.is_scaled and policy.scaling.batched and policy.scaling.all_operands


@dataclass(slots=True)
class _Place:
    """Place of an exponential of scores."""

    unit: Unit
    scope: str

    @property
    def words(self) -> tuple[str, str]:
        return clean_scope(self.scope), jax_compat.user_line(self.unit.eqn.source_info)


class _Scopes:
    """Scopes of units, of which few are asked for."""

    def __init__(self, units: Sequence[Unit] = (), scope: str = "") -> None:
        self._around: dict[Unit, Unit | str] = {}
        self.enter(units, scope)

    def enter(self, units: Sequence[Unit], around: Unit | str) -> None:
        """Enter units, and those inside of them, within a scope or a call that has one."""
        for unit in units:
            self._around[unit] = around
            self.enter(unit.inside or (), unit)

    def __getitem__(self, unit: Unit) -> str:
        around = self._around[unit]
        return joined_scope(around if isinstance(around, str) else self[around], unit.eqn)


class _Words(NamedTuple):
    """Attentions of a part of the program, found and refused."""

    attentions: tuple[Attention, ...] = ()
    refused: tuple[RefusedAttention, ...] = ()

    @property
    def backward(self) -> int:
        """Return how many backward passes are found."""
        return sum(a.backward for a in self.attentions)


class _Fuser:
    """Replacement of attentions, level by level."""

    def __init__(self, policy: PrecisionPolicy, kernels: list[Kernel]) -> None:
        self.policy, self.kernels = policy, kernels
        self.softmaxes = Softmaxes()
        self.attentions: list[Attention] = []
        self.refused: list[RefusedAttention] = []

    def level(self, closed: ClosedJaxpr, given: Given, scope: str) -> ClosedJaxpr:
        """Return a jaxpr, and those within, with attentions as single equations."""
        if closed.jaxpr not in self.softmaxes:
            return closed
        level = open_level(closed)
        changes = self.changes(level, given, _Scopes(level.units, scope))
        return emit_level(level, changes) if changes.any else closed

    def changes(self, level: Level, given: Given, scopes: _Scopes) -> Changes:
        """Return what changes in a level."""
        known = KnownNumbers(level, given)
        bodies, bindings = self._inside(level, known, scopes)
        scores = Scores(level, known)
        replacements = self._replacements(level, scores, known, scopes)
        for unit, reason in softmaxes_apart(level):
            self.refused.append(RefusedAttention(*_Place(unit, scopes[unit]).words, reason))
        return Changes(scores, replacements, bodies, bindings)

    def _inside(
        self, level: Level, known: KnownNumbers, scopes: _Scopes
    ) -> tuple[dict[Unit, list[ClosedJaxpr]], dict[Unit, Binding]]:
        """Return the jaxprs of loops, branches and the like that change, and pairs of loops."""
        bodies: dict[Unit, list[ClosedJaxpr]] = {}
        bindings: dict[Unit, Binding] = {}
        words: dict[Unit, _Words] = {}
        for unit in level.atomic():
            if unit.is_whole or wiring(unit.eqn) not in _ENTERED:
                continue
            if unit.eqn.primitive.name == "custom_vjp_call":
                continue
            inside = nested(unit.eqn)
            if not any(body.jaxpr in self.softmaxes for body in inside):
                continue
            given = _given(unit, known)
            change = functools.partial(self._bodies, inside, given, scopes[unit])
            changed = jax_compat.within(unit.eqn, change)
            words[unit] = self._taken()
            if any(new is not old for new, old in zip(changed, inside, strict=True)):
                bodies[unit] = changed
        for pair in pairs_of(level) if any(w.refused for w in words.values()) else ():
            both = pair.first, pair.second
            if not any(words.get(unit, _Words()).refused for unit in both):
                continue
            joined = join(pair, known)
            own = _Scopes()
            for unit, units in zip(both, joined.units, strict=True):
                own.enter(units, scopes[unit])
            changes = self.changes(joined.level, joined.given, own)
            found = self._taken()
            if changes.bindings and pair.first.eqn.primitive.name == "shard_map":
                continue  # what loops of both hand over would need specs
            if found.backward > sum(words.get(unit, _Words()).backward for unit in both):
                together = Together(joined, changes)
                for unit in both:
                    bodies.pop(unit, None)
                    bindings[unit] = together
                    words[unit] = _Words()
                words[pair.second] = found
        for unit_words in words.values():
            self.attentions += unit_words.attentions
            self.refused += unit_words.refused
        return bodies, bindings

    def _bodies(self, inside: list[ClosedJaxpr], given: Given, scope: str) -> list[ClosedJaxpr]:
        return [self.level(body, given, scope) for body in inside]

    def _taken(self) -> _Words:
        """Return what has been found and refused since, and forget it."""
        found = _Words(tuple(self.attentions), tuple(self.refused))
        self.attentions.clear()
        self.refused.clear()
        return found

    def _replacements(
        self, level: Level, scores: Scores, known: KnownNumbers, scopes: _Scopes
    ) -> list[Replacement]:
        matcher = Matcher(level, scores)
        makers = {o: u for u in level.equations() for o in numbers(u.outs)}
        order = {value: index for index, value in enumerate(makers)}
        chosen: list[Replacement] = []
        places: list[_Place] = []
        for exponential in matcher.candidates():
            unit = makers[scores.exponentials[exponential][0]]
            place = _Place(unit, scopes[unit])
            found = matcher.find(exponential)
            if found is None:
                continue
            if isinstance(found, Found):
                if _is_transpose(found, scores, order):
                    continue
                found = self._replacement(found, level, scores, known, makers, place)
            if isinstance(found, Obstacle):
                self.refused.append(RefusedAttention(*place.words, found.reason))
            else:
                chosen.append(found)
                places.append(place)
        return self._possible(level, scores, chosen, places)

    def _possible(
        self,
        level: Level,
        scores: Scores,
        chosen: list[Replacement],
        places: list[_Place],
    ) -> list[Replacement]:
        """Return the replacements beside which nobody computes weights."""
        pairs = list(zip(chosen, places, strict=True))
        while pairs:
            cut = frozenset().union(*(r.found.cut for r, _ in pairs))
            read = frozenset[int]().union(*(needed(scores, r) for r, _ in pairs))
            kept = kept_beside(level, cut, read)
            products = Counter(r.found.product for r, _ in pairs)
            wrong = [
                (r, p)
                for r, p in pairs
                if products[r.found.product] > 1 or weights_of(scores, r.found) & kept
            ]
            if not wrong:
                break
            for replacement, place in wrong:
                reason = _why_read(level, scores, replacement.found)
                self.refused.append(RefusedAttention(*place.words, reason))
            pairs = [pair for pair in pairs if pair not in wrong]
        for replacement, place in pairs:
            found, spec = replacement.found, replacement.spec
            is_biased = spec.kind == "none" and replacement.bias_shape is not None
            kind = "bias" if is_biased else spec.kind
            self.attentions.append(
                Attention(*place.words, "out" in found.results, found.backward, kind)
            )
        return [r for r, _ in pairs]

    def _replacement(
        self,
        found: Found,
        level: Level,
        scores: Scores,
        known: KnownNumbers,
        makers: Mapping[int, Unit],
        place: _Place,
    ) -> Replacement | Obstacle:
        """Return how an attention is replaced, or why it is not."""
        obstacle = self._told_otherwise(place) or _unfit_arrays(found, level, scores)
        if obstacle is not None:
            return obstacle
        told = {a for s in found.steps if isinstance(s, Masking) for a in s.factor.axes}
        layout = layout_of(found, [a for a in found.axes if a in told])
        if layout is None:
            return Obstacle("there is one query for all keys")
        if _has_bias_grad(found) and any(
            isinstance(step, Bias) and has_slope(step, found.keys, scores, known, makers)
            for step in found.steps
        ):
            return _SLOPE
        seen, rest, is_sure = known_masks(found, scores, known, makers, layout)
        masked_again = set[bool]() if is_sure else scores.weights_masked_again(found.exponential)
        if not is_sure and (obstacle := _unlike_softmax(found, scores, masked_again)) is not None:
            return obstacle
        scale = found.scale
        for step in found.steps:
            scale *= step.times if isinstance(step, Rescaling) else 1.0
        if (kinds := kinds_of(seen)) is None:
            kinds, rest = Kinds(), list(found.steps)
        spec = AttentionSpec(float(scale), *kinds)
        steps = [s for s in rest if not isinstance(s, Rescaling)]
        shape = _bias_shape(steps, layout) if steps else None
        narrow = self.policy.base.dtype
        q, k, v = (
            jax.ShapeDtypeStruct([size_of(p) for p in places], narrow)
            for places in (layout.q, layout.k, layout.v)
        )
        bias = shape and jax.ShapeDtypeStruct(shape, np.float32)
        biased = _biased(found, level, scores, steps)
        if (reason := refusal(q, k, v, bias, spec, self.kernels, biased)) is not None:
            return Obstacle(reason)
        return Replacement(found, layout, spec, rest, shape, is_sure, True in masked_again)

    def _told_otherwise(self, place: _Place) -> Obstacle | None:
        """Return what the user has said of an attention, if it must stay as it is."""
        if (kept := kept_precision(place.scope)) is not None:
            return Obstacle(f"kept in {kept.short} by the program")
        for name in ("found_attention", "dot_general"):
            view = EquationView(
                primitive=name,
                kind=OpKind.COMPUTE,
                scope=clean_scope(place.scope),
                functions=lambda: functions_around(place.scope, place.unit.eqn),
            )
            rules = self.policy.rules
            index = first_match(rules, view) if rules else None
            if index is not None and rules[index].precision not in _NARROW:
                return Obstacle(f"rule: {rules[index]}")
        return None


def _unfit_arrays(found: Found, level: Level, scores: Scores) -> Obstacle | None:
    """Return what is wrong if arrays are missing or not float32, or a product asks otherwise."""
    factors = [found.q, found.k, found.v, *([found.dout] if found.dout else [])]
    for factor in factors:
        home = home_of(scores, factor)
        if home is None or getattr(level.avals[home], "dtype", None) != np.float32:
            return Obstacle("operands are not float32 arrays")
    added = [s.factor for s in found.steps if not isinstance(s, Rescaling)]
    if any(home_of(scores, f) is None for f in added):
        return NO_PRODUCT
    parts = {found.product, *(f.base for f in added)}
    products = [u for u, e in scores.summed if found.exponential in e]
    products += [u for b, u in scores.products.items() if b in parts]
    is_explicit = any(has_explicit_precision(unit.eqn) for unit in products)
    return Obstacle(EXPLICIT_PRECISION) if is_explicit else None


def _unlike_softmax(found: Found, scores: Scores, masked_again: set[bool]) -> Obstacle | None:
    """Return what is wrong if a row that is masked whole has other weights than zeros or a softmax.

    Args:
      found: the attention.
      scores: the values.
      masked_again: whether products read weights that are masked after the softmax, too, or not.
    """
    if not found.is_shifted:
        return Obstacle("a row may be masked whole, and no maximum is subtracted")
    masks = sum(isinstance(step, Masking) for step in found.steps)
    is_mixed = len(masked_again) > 1 or (True in masked_again and masks != 1)
    if is_mixed or found.exponential in scores.algebra.guarded:
        return Obstacle("a row may be masked whole, and has weights of its own then")
    return None


def _is_transpose(found: Found, scores: Scores, order: Mapping[int, int]) -> bool:
    """Return whether it is the transpose of an attention, found in its own place or not at all.

    That is one too, with values and cotangents in each other's place: so there are operands that
    come after the first result.
    """

    def made(value: int) -> int:
        return order.get(value, -1)

    first = {name: min(made(h.value) for h in held) for name, held in found.results.items()}
    out = first.pop("out", -1)
    begin = min([out, *first.values()]) if out >= 0 else min(first.values())
    steps = [s.factor for s in found.steps if not isinstance(s, Rescaling)]
    for factor in (found.q, found.k, found.v, *steps):
        if made(home_of(scores, factor)) >= begin:  # type: ignore[arg-type]
            return True
    if not first:
        return False
    if found.dout is None or out > min(first.values()):
        return True
    return made(home_of(scores, found.dout)) >= min(first.values())  # type: ignore[arg-type]


def _given(unit: Unit, known: KnownNumbers) -> Given:
    """Return the inputs of a unit's jaxprs that are known numbers."""
    match wiring(unit.eqn):
        case Wiring.CALL:
            operands = list(enumerate(unit.ins))
        case Wiring.SCAN:
            operands = list(enumerate(unit.ins))[: loop(unit.eqn).invariants]
        case Wiring.BRANCHES:
            operands = list(enumerate(unit.ins[1:]))
        case _:
            operands = []
    if unit.eqn.primitive.name == "shard_map":  # a part of an array is on each device
        pairs = zip(unit.eqn.invars, nested(unit.eqn)[0].jaxpr.invars, strict=True)
        shapes: Any = [(whole.aval, part.aval) for whole, part in pairs]
        whole = {i for i, (a, b) in enumerate(shapes) if a.shape == b.shape}
        operands = [(i, a) for i, a in operands if i in whole]
    return {i: Outer(known, a) for i, a in operands if known.is_known(a)}


def _bias_shape(steps: Sequence[Any], layout: Any) -> tuple[int, ...]:
    """Return the shape of the sum of biases and masks."""
    shapes = [[size_of(p) for p in thinned(step.factor.places, layout.scores)] for step in steps]
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True))


def _biased(found: Found, level: Level, scores: Scores, steps: Sequence[Any]) -> Biased:
    """Return what is computed of an attention, and what its biases and masks are made of."""
    homes = {home_of(scores, step.factor) for step in steps}
    avals = [level.avals[home] for home in homes if home is not None]
    return Biased(
        given=sum(aval.size * aval.dtype.itemsize for aval in avals),
        forward="out" in found.results,
        backward=found.backward,
        bias_grad=found.backward and _has_bias_grad(found),
    )


def _has_bias_grad(found: Found) -> bool:
    """Return whether the cotangent of a bias is computed, or may be once this is differentiated."""
    return not found.backward or any(name.startswith("dbias") for name in found.results)


def _why_read(level: Level, scores: Scores, found: Found) -> str:
    """Return in words who else reads the weights of an attention."""
    moved = {
        value
        for value, forms in scores.forms.items()
        if found.exponential in scores.algebra.exponentials(forms.whole)
        and len(forms.whole.terms) == 1
        and len(forms.whole.axes) >= len(found.axes)
    }
    if not moved.isdisjoint(numbers(level.exits)):
        return "weights are returned"
    return "weights are read elsewhere"
