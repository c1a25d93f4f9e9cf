"""Replace attentions in a program by single equations, where a kernel takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxamp.core.features import Replaced
from jaxamp.found.attention.apart import softmaxes_apart
from jaxamp.found.attention.kernels.bias_bytes import Biased
from jaxamp.found.attention.kernels.fused import Fused as Kernel
from jaxamp.found.attention.kernels.platforms import at_hand, everywhere
from jaxamp.found.attention.kernels.refusal import refusal
from jaxamp.found.attention.kernels.spec import AttentionSpec
from jaxamp.found.attention.layout import layout_of, thinned
from jaxamp.found.attention.masks import Kinds, kinds_of, known_masks
from jaxamp.found.attention.match import (
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
from jaxamp.found.attention.replacement import Replacement, home_of
from jaxamp.found.attention.scores import Scores
from jaxamp.found.attention.slopes import has_slope
from jaxamp.found.attention.softmaxes import Softmaxes
from jaxamp.found.known_numbers import KnownNumbers
from jaxamp.found.levels import Level, Unit, numbers
from jaxamp.found.outcome import Refused
from jaxamp.found.places import NARROW, Place, Scopes
from jaxamp.found.replace_regions import replace_regions
from jaxamp.found.values import size_of
from jaxamp.jaxprs.explicit_precision import EXPLICIT_PRECISION, has_explicit_precision
from jaxamp.policy.policy import PrecisionPolicy

KIND = "attention"
_SLOPE = Obstacle("keys share numbers of a bias, whose gradient nearly cancels: 16 bits lose it")


class Attention(NamedTuple):
    """An attention that a program computes, as one equation of it.

    Attributes:
      scope: where it is, as the user wrote it.
      source: ``file:line (function)`` of the user's code.
      forward: whether its output is computed here.
      backward: whether its cotangents are computed here.
      mask: ``"none"``, ``"causal"``, ``"window"``, ``"segments"``, ``"intervals"`` or ``"bias"``.
    """

    scope: str
    source: str
    forward: bool
    backward: bool
    mask: str

    @property
    def kind(self) -> str:
        """Its kind, for reports."""
        return KIND


def fuse_attention(closed: ClosedJaxpr, policy: PrecisionPolicy) -> Replaced:
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
    return replace_regions(closed, _Attentions(policy, kernels)) if kernels else Replaced(closed)


def _kernels(policy: PrecisionPolicy) -> list[Kernel]:
    """Return the kernels that an attention may be replaced for."""
    if policy.base not in NARROW or policy.fused_attention is False:
        return []
    return everywhere() if policy.fused_attention else at_hand()


class _Attentions:
    """Attentions that some kernels take, under a policy."""

    crosses = True

    def __init__(self, policy: PrecisionPolicy, kernels: list[Kernel]) -> None:
        self.policy, self.kernels = policy, kernels
        self.softmaxes = Softmaxes()
        self.refused: list[Refused] = []

    def may_hold(self, jaxpr: Jaxpr) -> bool:
        """Return whether a softmax between two products may be in a jaxpr."""
        return jaxpr in self.softmaxes

    def find(
        self, level: Level, known: KnownNumbers, scopes: Scopes
    ) -> tuple[list[Replacement], list[Refused]]:
        """Return the attentions of a level, and what looks like one."""
        self.refused = []
        replacements = self._replacements(level, Scores(level, known), known, scopes)
        for unit, reason in softmaxes_apart(level):
            self._refuse(scopes.place(unit), reason)
        return replacements, self.refused

    def _refuse(self, place: Place, reason: str) -> None:
        self.refused.append(Refused(KIND, *place.words, reason))

    def _replacements(
        self, level: Level, scores: Scores, known: KnownNumbers, scopes: Scopes
    ) -> list[Replacement]:
        matcher = Matcher(level, scores)
        makers = {o: u for u in level.equations() for o in numbers(u.outs)}
        order = {value: index for index, value in enumerate(makers)}
        chosen: list[Replacement] = []
        places: list[Place] = []
        for exponential in matcher.candidates():
            unit = makers[scores.exponentials[exponential][0]]
            place = scopes.place(unit)
            found = matcher.find(exponential)
            if found is None:
                continue
            if isinstance(found, Found):
                if _is_transpose(found, scores, order):
                    continue
                found = self._replacement(found, level, scores, known, makers, place)
            if isinstance(found, Obstacle):
                self._refuse(place, found.reason)
            else:
                chosen.append(found)
                places.append(place)
        return self._possible(level, scores, chosen, places)

    def _possible(
        self,
        level: Level,
        scores: Scores,
        chosen: list[Replacement],
        places: list[Place],
    ) -> list[Replacement]:
        """Return the replacements beside which nobody computes weights."""
        pairs = list(zip(chosen, places, strict=True))
        while pairs:
            cut = frozenset().union(*(r.found.cut for r, _ in pairs))
            read = frozenset[int]().union(*(r.needed for r, _ in pairs))
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
                self._refuse(place, reason)
            pairs = [pair for pair in pairs if pair not in wrong]
        for replacement, place in pairs:
            found, spec = replacement.found, replacement.spec
            is_biased = spec.kind == "none" and replacement.bias_shape is not None
            kind = "bias" if is_biased else spec.kind
            replacement.outcome = Attention(
                *place.words, "out" in found.results, found.backward, kind
            )
        return [r for r, _ in pairs]

    def _replacement(
        self,
        found: Found,
        level: Level,
        scores: Scores,
        known: KnownNumbers,
        makers: Mapping[int, Unit],
        place: Place,
    ) -> Replacement | Obstacle:
        """Return how an attention is replaced, or why it is not."""
        told = place.told_otherwise(self.policy, "found_attention", "dot_general")
        obstacle = Obstacle(told) if told else _unfit_arrays(found, level, scores)
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
        is_zeroed = True in masked_again
        return Replacement(found, layout, spec, scores, rest, shape, is_sure, is_zeroed)


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
