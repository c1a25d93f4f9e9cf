"""Replace attentions in a program by single equations, where a kernel takes them."""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxamp.core.features import Outcome, Replaced
from jaxamp.found.attention.kernels.fused import Fused as Kernel
from jaxamp.found.attention.kernels.platforms import at_hand, everywhere, refusal
from jaxamp.found.attention.layout import layout_of
from jaxamp.found.attention.masks import kernel_words
from jaxamp.found.attention.match import NO_PRODUCT, Found, Masking, Matcher
from jaxamp.found.attention.replacement import KIND, Replacement
from jaxamp.found.attention.scores import Scores
from jaxamp.found.attention.slopes import has_slope
from jaxamp.found.emit_level import staying
from jaxamp.found.levels import Level, Unit, made, numbers
from jaxamp.found.places import NARROW, told_otherwise, words_of
from jaxamp.found.replace_regions import replace_regions
from jaxamp.jaxprs.contracted import EXPLICIT_PRECISION, has_explicit_precision
from jaxamp.jaxprs.known_arrays import KnownArrays
from jaxamp.plan.decision import Plan
from jaxamp.policy.policy import PrecisionPolicy

_SYMBOLIC = "sizes are symbolic, and kernels need numbers"
_APART = "devices hold parts of its arrays that the types of a mesh do not let a kernel read"
_SLOPE = "keys share numbers of a bias, whose gradient nearly cancels: 16 bits lose it"


def fuse_attention(closed: ClosedJaxpr, policy: PrecisionPolicy) -> Replaced:
    """Return a float32 program with its attentions as single equations, as a policy has them.

    >>> import jax, jax.numpy as jnp
    >>> def attend(q, k, v):
    ...     return jax.nn.softmax(q @ k.T) @ v
    >>> x = jnp.ones((64, 64))
    >>> policy = PrecisionPolicy.MIXED_BF16.replace(fused_attention=True)
    >>> fused = fuse_attention(jax.make_jaxpr(attend)(x, x, x), policy)
    >>> [eqn.primitive.name for eqn in fused.jaxpr.eqns if "attention" in eqn.primitive.name]
    ['attention_forward']
    """
    if policy.base not in NARROW or policy.fused_attention is False:
        return Replaced(closed)
    kernels = everywhere() if policy.fused_attention else at_hand()
    return replace_regions(closed, _Attentions(policy, kernels)) if kernels else Replaced(closed)


def fused_elsewhere(plan: Plan) -> Replaced:
    """Return what other kernels would run if these know of none, and why they do not run it."""
    if any(outcome.kind == KIND for outcome in (*plan.found, *plan.refused)):
        return Replaced(plan.jaxpr)
    policy, obstacle = _for_every_kernel(plan.policy)
    fused = fuse_attention(plan.jaxpr, policy)
    return fused._replace(
        found=tuple(dataclasses.replace(o, obstacle=obstacle) for o in fused.found)
    )


def _for_every_kernel(policy: PrecisionPolicy) -> tuple[PrecisionPolicy, str]:
    """Return a policy that looks for every kernel, and why the one that was asked for does not."""
    if policy.base.bits != 16:
        word = policy.base.short
        default = PrecisionPolicy.MIXED_BF16.replace(fused_attention=True)
        return default, f"the policy's products are {word}, and the kernels take 16 bits"
    wanted = policy.replace(fused_attention=True)
    if policy.fused_attention is False:
        return wanted, "the policy says fused_attention=False"
    return wanted, f"no kernel runs it on this {jax.default_backend().upper()}"


class _Attentions:
    """Attentions that some kernels take, under a policy."""

    crosses = True
    parts = frozenset({"dot_general", "exp"})

    def __init__(self, policy: PrecisionPolicy, kernels: list[Kernel]) -> None:
        self.policy, self.kernels = policy, kernels
        self.refused: list[Outcome] = []

    def word(self, eqn: JaxprEqn) -> str:
        """Return the name of an equation; there is one for exponentials."""
        return "exp" if eqn.primitive.name == "exp2" else eqn.primitive.name

    def find(self, level: Level, known: KnownArrays) -> tuple[list[Replacement], list[Outcome]]:
        """Return the attentions of a level, and what looks like one."""
        self.refused = []
        if not all(isinstance(n, int) for aval in level.avals for n in np.shape(aval)):
            exponentials = (u for u in level.equations if self.word(u.eqn) == "exp")
            return [], [Outcome(KIND, *words_of(unit), _SYMBOLIC) for unit in exponentials]
        scores = Scores(level, known)
        matcher = Matcher(scores)
        chosen: list[Replacement] = []
        for exponential in matcher.candidates():
            unit = scores.level.makers[scores.exponentials[exponential][0]]
            found = matcher.find(exponential)
            if isinstance(found, Found):
                if _is_transpose(found, scores):
                    continue
                found = self._replacement(found, scores, unit)
            if isinstance(found, str):
                self._refuse(unit, found)
            elif found is not None:
                chosen.append(found)
        return self._possible(scores, chosen), self.refused

    def _refuse(self, unit: Unit, reason: str) -> None:
        self.refused.append(Outcome(KIND, *words_of(unit), reason))

    def _possible(self, scores: Scores, chosen: list[Replacement]) -> list[Replacement]:
        """Return the replacements beside which nobody computes weights, or products for them."""
        while True:
            units, read = staying(scores.level, chosen)
            kept = read.union(*map(made, units))
            products = Counter(r.found.product for r in chosen)
            wrong = [
                r
                for r in chosen
                if products[r.found.product] > 1
                or scores.homes[r.found.product][0] in kept
                or not kept.isdisjoint(scores.exponentials[r.found.exponential])
            ]
            if not wrong:
                return chosen
            for replacement in wrong:
                self._refuse(replacement.unit, _why_read(scores, replacement.found))
            chosen = [r for r in chosen if r not in wrong]

    def _replacement(self, found: Found, scores: Scores, unit: Unit) -> Replacement | str:
        """Return how an attention is replaced, or why it is not."""
        told = told_otherwise(unit, self.policy, "attention_forward", "dot_general")
        if obstacle := told or _unfit_arrays(found, scores):
            return obstacle
        ordered = {a for s in found.steps if isinstance(s, Masking) for a in s.factor.axes}
        layout = layout_of(found, [a for a in found.axes if a in ordered])
        if layout is None:
            return "there is one query for all keys"
        if _has_bias_grad(found) and any(has_slope(b, found.keys, scores) for b in found.biases):
            return _SLOPE
        spec, rest, is_sure = kernel_words(found, scores, layout)
        masked_again = set[bool]() if is_sure else scores.weights_masked_again(found.exponential)
        if not is_sure and (obstacle := _unlike_softmax(found, scores, masked_again)):
            return obstacle
        is_zeroed = True in masked_again
        replaced = Replacement(unit, found, layout, spec, scores, rest, is_sure, is_zeroed)
        refused = refusal(replaced.types(self.policy.base.dtype), spec, self.kernels)
        return refused or (replaced if replaced.lies_alike() else _APART)


def _unfit_arrays(found: Found, scores: Scores) -> str | None:
    """Return what is wrong if arrays are missing or not float32, or a product asks otherwise."""
    for factor in found.operands:
        home = scores.home(factor)
        if home is None or getattr(scores.level.avals[home], "dtype", None) != np.float32:
            return "operands are not float32 arrays"
    added = [step.factor for step in found.steps]
    if any(scores.home(f) is None for f in added):
        return NO_PRODUCT
    parts = {found.product, *(f.base for f in added)}
    products = [u for u, e in scores.summed if found.exponential in e]
    homes = (home for base, (home, _) in scores.homes.items() if base in parts)
    products += map(scores.level.makers.__getitem__, homes)
    is_explicit = any(has_explicit_precision(unit.eqn) for unit in products)
    return EXPLICIT_PRECISION if is_explicit else None


def _unlike_softmax(found: Found, scores: Scores, masked_again: set[bool]) -> str | None:
    """Return what is wrong if a row masked whole has other weights than zeros or a softmax."""
    if not found.is_shifted:
        return "a row may be masked whole, and no maximum is subtracted"
    masks = sum(isinstance(step, Masking) for step in found.steps)
    is_mixed = len(masked_again) > 1 or (True in masked_again and masks != 1)
    if is_mixed or found.exponential in scores.algebra.guarded:
        return "a row may be masked whole, and has weights of its own then"
    return None


def _is_transpose(found: Found, scores: Scores) -> bool:
    """Return whether it is the transpose of an attention, found in its own place or not at all.

    That is one too, with values and cotangents in each other's place: so there are operands that
    come after the first result. Values are numbered in the order in which they are made.
    """

    def place(value: int | None) -> int:
        return -1 if value is None or value not in scores.level.makers else value

    first = {name: min(place(h.value) for h in held) for name, held in found.results.items()}
    begin = min(first.values())
    added = [step.factor for step in found.steps]
    if any(place(scores.home(f)) >= begin for f in (found.q, found.k, found.v, *added)):
        return True
    out = first.pop("out", -1)
    if not first:
        return False
    return found.dout is None or max(out, place(scores.home(found.dout))) >= min(first.values())


def _has_bias_grad(found: Found) -> bool:
    """Return whether the cotangent of a bias is computed, or may be once this is differentiated."""
    return not found.backward or any(name.startswith("dbias") for name in found.results)


def _why_read(scores: Scores, found: Found) -> str:
    moved = {
        value
        for value, forms in scores.forms.items()
        if found.exponential in scores.algebra.exponentials(forms.whole)
        and len(forms.whole.terms) == 1
        and len(forms.whole.axes) >= len(found.axes)
    }
    if not moved.isdisjoint(numbers(scores.level.exits)):
        return "weights are returned"
    return "weights are read elsewhere"
