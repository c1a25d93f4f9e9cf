"""Random spellings of attention: every choice that people make, combined at random."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import Array, lax

import jaxamp
from jaxamp.found.attention.kernels.spec import AttentionSpec
from tests.found.attention import imitation, oracle
from tests.found.attention.accuracy import FLOOR, LIMIT, POLICIES

B, T, H = 2, 16, 8
DRAWS = 32
"""How many arguments the errors of a recipe are looked at for."""

LAYOUTS = ("btnh", "bnth", "tbnh", "nbth", "bnht", "tnbh")
SCORES = ("bnts", "btns", "btsn", "bnst", "nbts", "tsbn")
HEADS = {"one": (1, 1), "own": (3, 3), "grouped": (4, 2), "shared": (3, 1)}
GROUPS = ("repeated", "broadcast", "reshaped")
SCALES: dict[str, Callable[[float], tuple[float, float, float]]] = {
    "after": lambda s: (1.0, 1.0, s),
    "queries": lambda s: (s, 1.0, 1.0),
    "keys": lambda s: (1.0, s, 1.0),
    "both": lambda s: (math.sqrt(s), math.sqrt(s), 1.0),
    "two": lambda s: (2 * s, 1.0, 0.5),
}
"""Factors on queries, keys and scores."""

MASKS = ("none", "causal", "window", "lengths", "present", "segments", "random")
HOW = ("-1e9", "-inf", "min", "added")
BIASES = ("none", "heads", "examples", "keys", "slopes")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One way to write attention."""

    queries: str = "btnh"
    keys: str = "btnh"
    values: str = "btnh"
    results: str = "btnh"
    scores: str = "bnts"
    heads: str = "own"
    group: str = "repeated"
    scale: str = "after"
    divides: bool = False
    mask: str = "none"
    how: str = "-inf"
    bias: str = "none"
    softmax: str = "jax"
    wrap: str = "none"
    longer: bool = False
    spread: float = 1.0
    dtype: str = "bfloat16"


def recipes() -> st.SearchStrategy[Recipe]:
    """All combinations that mean something."""
    layout = st.sampled_from(LAYOUTS)
    drawn = st.builds(
        Recipe,
        queries=layout,
        keys=layout,
        values=layout,
        results=st.sampled_from(LAYOUTS),
        scores=st.sampled_from(SCORES),
        heads=st.sampled_from([*HEADS]),
        group=st.sampled_from(GROUPS),
        scale=st.sampled_from([*SCALES]),
        divides=st.booleans(),
        mask=st.sampled_from(MASKS),
        how=st.sampled_from(HOW),
        bias=st.sampled_from(BIASES),
        softmax=st.sampled_from([*SOFTMAXES]),
        wrap=st.sampled_from([*WRAPS]),
        longer=st.booleans(),
        spread=st.sampled_from([1.0, 5.0, 30.0]),
        dtype=st.sampled_from([*POLICIES]),
    )
    return drawn.map(_sensible)


def _sensible(r: Recipe) -> Recipe:
    """Causal attention has as many keys as queries; without a maximum, logits are small."""
    if r.mask in ("causal", "window", "segments"):
        r = dataclasses.replace(r, longer=False)
    if r.softmax == "bare":
        # Far masked places are zeros there, where nothing is subtracted.
        r = dataclasses.replace(r, spread=1.0)
    return r


@dataclasses.dataclass(frozen=True)
class Values:
    """The product with the values, of weights in the scores' layout."""

    recipe: Recipe
    v: Array

    def __call__(self, weights: Array) -> Array:
        r = self.recipe
        letters = [_names(r, r.scores), _names(r, r.values, key=True), _names(r, r.results)]
        return jnp.einsum("{},{}->{}".format(*letters), weights, self.v)

    def totals(self, e: Array) -> Array:
        """Sum up exponentials, in the layout of the results."""
        r = self.recipe
        rows = _names(r, r.scores).replace("s", "")
        total = jnp.einsum(f"{_names(r, r.scores)}->{rows}", e)
        wanted = _names(r, r.results)
        total = jnp.einsum(f"{rows}->{wanted.replace('h', '')}", total)
        return jnp.expand_dims(total, wanted.index("h"))


# The softmax over one axis of the scores, and the product with the values.


def _jax(s: Array, apply: Values, axis: int) -> Array:
    return apply(jax.nn.softmax(s, axis=axis))


def _by_hand(s: Array, apply: Values, axis: int) -> Array:
    e = jnp.exp(s - lax.stop_gradient(s.max(axis, keepdims=True)))
    return apply(e / e.sum(axis, keepdims=True))


def _through_the_maximum(s: Array, apply: Values, axis: int) -> Array:
    e = jnp.exp(s - s.max(axis, keepdims=True))
    return apply(e * (1 / e.sum(axis, keepdims=True)))


def _bare(s: Array, apply: Values, axis: int) -> Array:
    e = jnp.exp(s)
    return apply(e / e.sum(axis, keepdims=True))


def _logsumexp(s: Array, apply: Values, axis: int) -> Array:
    return apply(jnp.exp(s - jax.nn.logsumexp(s, axis=axis, keepdims=True)))


def _log_softmax(s: Array, apply: Values, axis: int) -> Array:
    return apply(jnp.exp(jax.nn.log_softmax(s, axis=axis)))


def _at_the_end(s: Array, apply: Values, axis: int) -> Array:
    e = jnp.exp(s - lax.stop_gradient(s.max(axis, keepdims=True)))
    return apply(e) / apply.totals(e)


def _powers_of_two(s: Array, apply: Values, axis: int) -> Array:
    s = s * math.log2(math.e)
    e = jnp.exp2(s - lax.stop_gradient(s.max(axis, keepdims=True)))
    return apply(e / e.sum(axis, keepdims=True))


SOFTMAXES: dict[str, Callable[[Array, Values, int], Array]] = {
    "jax": _jax,
    "by hand": _by_hand,
    "through the maximum": _through_the_maximum,
    "bare": _bare,
    "logsumexp": _logsumexp,
    "log_softmax": _log_softmax,
    "at the end": _at_the_end,
    "powers of two": _powers_of_two,
}

WRAPS: dict[str, Callable[[Any], Any]] = {
    "none": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "saved products": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
}


def _names(r: Recipe, layout: str, key: bool = False) -> str:
    """A layout's letters: keys have words s, and heads that may be of groups."""
    letters = layout.replace("t", "s") if key else layout
    if r.group != "reshaped":
        return letters
    return letters.replace("n", "k" if key else "kg")


def written(r: Recipe) -> Callable[..., Array]:
    """The function of a recipe: of q, k, v in its layouts, a bias and what its mask needs."""

    def run(q: Array, k: Array, v: Array, bias: Array, known: Array) -> Array:
        on_q, on_k, on_s = SCALES[r.scale](H**-0.5)
        q, k = _scaled(q, on_q, r), _scaled(k, on_k, r)
        q, k, v = _with_groups(q, k, v, r)
        names = f"{_names(r, r.queries)},{_names(r, r.keys, key=True)}->{_names(r, r.scores)}"
        s = _scaled(jnp.einsum(names, q, k), on_s, r)
        at = {n: i for i, n in enumerate(_names(r, r.scores))}
        if r.bias != "none":
            s = s + _placed(_bias_of(r, bias), r)
        if r.mask != "none":
            s = _masked(s, _placed(_seen(r, known), r), r.how)
        return SOFTMAXES[r.softmax](s, Values(r, v), at["s"])

    def whole(*args: Array) -> Array:
        out = WRAPS[r.wrap](run)(*args)
        if r.group == "reshaped":
            at = r.results.index("n")
            out = out.reshape(*out.shape[:at], -1, *out.shape[at + 2 :])
        return out

    return whole


def _scaled(x: Array, factor: float, r: Recipe) -> Array:
    if factor == 1:
        return x
    return x / (1 / factor) if r.divides else x * factor


def _with_groups(q: Array, k: Array, v: Array, r: Recipe) -> tuple[Array, Array, Array]:
    """Give keys and values a head for each query, or queries an axis of groups."""
    heads, key_heads = HEADS[r.heads]
    group = heads // key_heads
    if r.group == "reshaped":
        at = r.queries.index("n")
        return q.reshape(*q.shape[:at], key_heads, group, *q.shape[at + 1 :]), k, v
    if group == 1:
        return q, k, v
    found = []
    for x, layout in ((k, r.keys), (v, r.values)):
        at = layout.index("n")
        if r.group == "repeated":
            found.append(jnp.repeat(x, group, axis=at))
        else:
            wide = jnp.expand_dims(x, at + 1)
            shape = (*x.shape[: at + 1], group, *x.shape[at + 1 :])
            wide = jnp.broadcast_to(wide, shape)
            found.append(wide.reshape(*x.shape[:at], heads, *x.shape[at + 1 :]))
    return q, *found


def _placed(x: Array, r: Recipe) -> Array:
    """From [b, n, t, s], some of them 1, to the layout of the scores."""
    if r.group == "reshaped":
        heads, key_heads = HEADS[r.heads]
        split = (key_heads, heads // key_heads) if x.shape[1] > 1 else (1, 1)
        x = x.reshape(x.shape[0], *split, *x.shape[2:])
        return jnp.einsum(f"bkgts->{_names(r, r.scores)}", x)
    return jnp.einsum(f"bnts->{r.scores}", x)


def _masked(s: Array, seen: Array, how: str) -> Array:
    if how == "added":
        return s + (1.0 - seen.astype(s.dtype)) * -1e9
    least = {"-1e9": -1e9, "-inf": -jnp.inf, "min": jnp.finfo(s.dtype).min}[how]
    return jnp.where(seen, s, least)


def _seen(r: Recipe, known: Any) -> Any:
    """Bool [1 or B, 1, 1 or T, S]; `known` is what the program is given for it."""
    keys = keys_of(r)
    past = jnp.arange(T)[:, None] - jnp.arange(keys)[None]
    if r.mask == "causal":
        return (past >= 0)[None, None]
    if r.mask == "window":
        return ((past >= 0) & (past < 5))[None, None]
    if r.mask == "lengths":
        return (jnp.arange(keys) < known[:, None])[:, None, None]
    if r.mask == "present":
        return known[:, None, None]
    if r.mask == "segments":
        return (known[:, :, None] == known[:, None, :])[:, None]
    return known[:, None]


def _bias_of(r: Recipe, bias: Any) -> Any:
    if r.bias == "slopes":
        past = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(keys_of(r))[None])
        return -(bias[:, None, None] * past)[None]
    return bias


def keys_of(r: Recipe) -> int:
    """How many keys there are."""
    return T + 8 if r.longer else T


def arguments(r: Recipe, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Queries, keys, values, the bias and what the mask needs, of [b, t, n, h] before layouts.

    The mask is the same for all seeds.
    """
    draw, of_mask = np.random.default_rng(seed), np.random.default_rng(0)
    (heads, key_heads), keys = HEADS[r.heads], keys_of(r)
    q = r.spread * draw.standard_normal((B, T, heads, H))
    k, v = (draw.standard_normal((B, keys, key_heads, H)) for _ in range(2))
    shapes = {
        "none": (1,),
        "heads": (1, heads, T, keys),
        "examples": (B, heads, T, keys),
        "keys": (B, 1, 1, keys),
        "slopes": (heads,),
    }
    bias = draw.standard_normal(shapes[r.bias])
    known = {
        "lengths": np.array([keys, keys // 2]),
        "present": np.arange(keys) % 5 < np.array([[3], [5]]),
        "segments": np.arange(keys) // np.array([[5], [9]]),
        "random": (of_mask.uniform(size=(B, T, keys)) < 0.7) | (np.arange(keys) == 0),
    }.get(r.mask, np.zeros(1))
    return (*(x.astype(np.float32) for x in (q, k, v, bias)), known)


def check_meaning(r: Recipe) -> None:
    """Hold the float32 program of a recipe to the oracle.

    Raises:
        AssertionError: it is not attention.
    """
    problem = _Problem(r)
    found = problem.results(problem.fn, problem.gradient())
    for got, want in zip(jax.jit(found)(*problem.operands), problem.exact(), strict=True):
        assert got.shape == want.shape
        assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(want) + 1e-4, r


def check(r: Recipe) -> bool:
    """Hold a recipe to its float64 meaning, in both orders; whether it was found in both.

    Errors are those of several draws together: where a row has one weight of nearly one, as with
    logits of deviation 30, few rows make the error of a draw, which is 0.6 to 3 times that of the
    form written out by chance. What is beyond the limit in few draws is measured in many.

    Raises:
        AssertionError: the output or a gradient is less accurate than that of the form written
            out, times `LIMIT`.
    """
    problem = _Problem(r)
    policy = jaxamp.PrecisionPolicy.parse(POLICIES[r.dtype]).replace(fused_attention=True)

    def both(policy: Any) -> Any:
        amped = jaxamp.amp(problem.fn, policy)
        forms = (problem.gradient(amped), jaxamp.amp(problem.gradient(), policy))
        inside, around = (problem.results(amped, form) for form in forms)
        return lambda *xs: (inside(*xs), around(*xs))

    fused, composed = both(policy), both(policy.replace(fused_attention=False))
    with imitation.kernels(block=8):
        run = jax.jit(lambda *xs: (fused(*xs), composed(*xs))).lower(*problem.operands).compile()
    draws: list[Any] = []
    for count in (DRAWS, 8 * DRAWS):
        more = (_Problem(r, seed) for seed in range(len(draws), count))
        draws += [(*run(*p.operands), p.exact()) for p in more]
        worse = _less_accurate(draws, r)
        if not worse:
            break
    assert not worse, (r, worse)
    programs = (lambda *xs: problem.fn(*xs, problem.known), problem.gradient())
    plans = [jaxamp.plan_of(fn, policy)(*problem.operands) for fn in programs]
    return all(plan.found for plan in plans)


class _Problem:
    """A recipe's program, its operands in their layouts, and what they give in float64."""

    def __init__(self, r: Recipe, seed: int = 0) -> None:
        self.recipe, self.fn = r, written(r)
        *self.canonical, self.bias, self.known = arguments(r, seed)
        layouts = (r.queries, r.keys, r.values)
        operands = zip(self.canonical, layouts, strict=True)
        self.operands = (*(np.einsum(f"btnh->{to}", x) for x, to in operands), self.bias)
        queries = self.canonical[0]
        self.dout = np.cos(np.arange(queries.size, dtype=np.float32)).reshape(queries.shape)

    def gradient(self, fn: Any = None) -> Callable[..., Any]:
        """The gradient of a loss of the program, or of another form of it."""
        weights = np.einsum(f"btnh->{self.recipe.results}", self.dout)

        def loss(*xs: Any) -> Any:
            return jnp.sum((fn or self.fn)(*xs, self.known) * weights)

        return jax.grad(loss, (0, 1, 2, 3))

    def results(self, fn: Any, gradient: Any) -> Callable[..., Any]:
        """The output and the gradient."""
        return lambda *xs: (fn(*xs, self.known), *gradient(*xs))

    def exact(self) -> tuple[np.ndarray, ...]:
        """The same in float64."""
        r = self.recipe
        wide = [np.asarray(x, np.float64) for x in (*self.canonical, self.dout)]
        added = None if r.bias == "none" else np.asarray(_bias_of(r, self.bias), np.float64)
        mask = None if r.mask == "none" else np.asarray(_seen(r, jnp.asarray(self.known)))
        spec = AttentionSpec(scale=H**-0.5)
        *found, ds = oracle.attention(*wide, spec=spec, bias=added, mask=mask)
        layouts = (r.results, r.queries, r.keys, r.values)
        placed = [np.einsum(f"btnh->{to}", x) for x, to in zip(found, layouts, strict=True)]
        return (*placed, _bias_cotangent(r, self.bias, ds))


def _bias_cotangent(r: Recipe, bias: np.ndarray, ds: np.ndarray) -> np.ndarray:
    """The cotangent of a bias from that of the scores."""
    if r.bias == "none":
        return np.zeros(bias.shape)
    if r.bias == "slopes":
        past = np.abs(np.arange(T)[:, None] - np.arange(keys_of(r))[None])
        return -np.sum(ds * past, axis=(0, 2, 3))
    axes = tuple(i for i, n in enumerate(bias.shape) if n != ds.shape[i])
    return ds.sum(axes, keepdims=True)


def _less_accurate(draws: Sequence[Any], r: Recipe) -> list[str]:
    """The results whose errors in all draws are beyond those of the form written out."""
    worse = []
    for order, result in itertools.product(range(2), range(5)):
        forms = ((mine[order], other[order], exact) for mine, other, exact in draws)
        got, other, want = (
            np.stack([np.asarray(x[result], np.float64) for x in form])
            for form in zip(*forms, strict=True)
        )
        assert got.shape == want.shape
        own, error, size = map(np.linalg.norm, (got - want, other - want, want))
        if not own <= LIMIT * max(error, 2 * FLOOR[r.dtype] * size) + 1e-6:
            worse.append(f"result {result} of order {order}: {own:.2e} for {error:.2e}")
    return worse
