"""The table of what primitives do to a rounding, and where their results lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxamp.core.intervals import Interval, anywhere, hull
from jaxamp.core.semantics import UNKNOWN, Linear, Semantics
from jaxamp.core.taxonomy import TABLE, OpKind, Trait

POINTS = np.array([-90, -3, -1, -0.5, 0, 0.25, 0.5, 1, 2, 6, 90], np.float32)
PARTS = [Interval(float(a), float(b)) for i, a in enumerate(POINTS) for b in POINTS[i:]]

Curve = Callable[..., Any]
_LAX = {
    **dict.fromkeys(("abs", "neg", "sign", "sqrt", "ceil", "floor", "round", "square", "rsqrt")),
    **dict.fromkeys(("tanh", "logistic", "erf", "atan", "asinh", "bessel_i0e", "bessel_i1e")),
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log1p", "cbrt", "sin", "cos", "sinh", "cosh")),
    **dict.fromkeys(("asin", "acos", "acosh", "erfc", "is_finite", "stop_gradient")),
}
UNARY: dict[str, Curve] = {name: getattr(lax, name) for name in _LAX} | {
    "copy": lambda x: x,
    "log2": np.log2,
}
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
BINARY: dict[str, Curve] = {
    **{name: getattr(lax, name) for name in ("max", "min", "add", "sub", "mul", "div", "pow")},
    **{name: getattr(lax, name) for name in ("atan2", "igamma", "igammac", *_COMPARED)},
    **{f"{name}_to": getattr(lax, name) for name in ("eq", "lt", "le")},
    "add_any": lax.add,
}
_TERMS = 5
REDUCED: dict[str, Curve] = {
    **dict.fromkeys(("reduce_sum", "psum", "psum_invariant", "unreduced_psum"), jnp.sum),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), jnp.sum),
    **dict.fromkeys(("reduce_max", "cummax", "pmax", "unreduced_pmax"), jnp.max),
    **dict.fromkeys(("reduce_min", "cummin", "pmin", "unreduced_pmin"), jnp.min),
    **dict.fromkeys(("sort", "top_k", "approx_top_k", "select_and_gather_add"), jnp.sort),
    **dict.fromkeys(("argmax", "argmin"), jnp.argmax),
    "reduce_window_max": jnp.max,
    "reduce_window_min": jnp.min,
    "cumsum": jnp.cumsum,
    "cumlogsumexp": lax.cumlogsumexp,
}
OTHERS = ("clamp", "select_n", "integer_pow", "regularized_incomplete_beta")
"""Those with tests of their own."""


def semantics_of(name: str) -> Semantics:
    return TABLE[name].semantics


def test_the_table_is_complete() -> None:
    """All that computes elementwise, reduces or orders has semantics, and nothing else."""
    kinds = (OpKind.ELEMENTWISE, OpKind.REDUCTION)
    arithmetic = {n for n, op in TABLE.items() if op.kind in kinds or op.trait is Trait.EXTREMUM}
    assert {n for n, op in TABLE.items() if op.semantics is not UNKNOWN} == arithmetic


def test_every_range_is_tested() -> None:
    tested = {*UNARY, *BINARY, *REDUCED, *OTHERS}
    assert {n for n, op in TABLE.items() if op.semantics.range is not anywhere} == tested


GRID = np.unique([*POINTS, *np.linspace(-3, 3, 25, dtype=np.float32)])


def _within(x: Interval, points: np.ndarray = GRID) -> np.ndarray:
    """Return where points lie in an interval."""
    return (points >= x.low) & (points <= x.high)


def _holds(found: Interval, results: object) -> bool:
    limit = float(np.finfo(np.float32).max)
    numbers = np.clip(np.asarray(results, np.float64), -limit, limit)
    numbers = numbers[~np.isnan(numbers)]
    low, high = np.clip(found, -limit, limit)
    slack = 1e-5 * np.abs(numbers) + 1e-6  # float32 rounds
    return bool((numbers >= low - slack).all() and (numbers <= high + slack).all())


@pytest.mark.parametrize("name", UNARY)
def test_results_of_curves_lie_where_the_table_says(name: str) -> None:
    facts = semantics_of(name)
    with np.errstate(all="ignore"):
        results = np.asarray(UNARY[name](GRID), np.float64)
    for x in PARTS:
        assert _holds(facts.range(x), results[_within(x)]), x


@pytest.mark.parametrize("name", BINARY)
def test_results_of_pairs_lie_where_the_table_says(name: str) -> None:
    facts, parts = semantics_of(name), PARTS[::5]
    grid = np.meshgrid(POINTS, POINTS)
    results = np.asarray(BINARY[name](*grid), np.float64)
    for x in parts:
        for y in parts:
            inside = _within(x, grid[0]) & _within(y, grid[1])
            assert _holds(facts.range(x, y), results[inside]), (x, y)


@pytest.mark.parametrize("name", REDUCED)
def test_results_of_reductions_lie_where_the_table_says(name: str) -> None:
    rng, facts = np.random.default_rng(0), semantics_of(name)
    for x in (Interval(*part) for part in [(-3, 2), (0.25, 1), (1, 6), (0, 0.5), (-1, -0.5)]):
        numbers = rng.uniform(*x, _TERMS).astype(np.float32)
        assert _holds(facts.range(x, Interval(_TERMS, _TERMS)), REDUCED[name](numbers)), x


def test_other_results_lie_where_the_table_says() -> None:
    one, two = Interval(-1, 2), Interval(1, 6)
    assert semantics_of("clamp").range(one, Interval(-90, 90), two) == Interval(-1, 6)
    select = semantics_of("select_n").range
    assert select(Interval(0, 1), one, two) == hull(one, two)
    assert select(Interval(1, 1), one, two) == two
    for power in (-3, -2, -1, 0, 1, 2, 3):
        for x in PARTS:
            numbers = GRID[_within(x) & (GRID != 0)] ** float(power)
            assert _holds(semantics_of("integer_pow").range(x, Interval(power, power)), numbers)
    assert semantics_of("regularized_incomplete_beta").range(two, two, two) == Interval(0, 1)


@pytest.mark.parametrize("name", UNARY)
def test_linear_curves_are_linear(name: str) -> None:
    if semantics_of(name).linear is Linear.ALL:
        np.testing.assert_allclose(UNARY[name](2 * POINTS), 2 * UNARY[name](POINTS))


def test_what_is_not_listed_may_be_anywhere() -> None:
    assert TABLE["reshape"].semantics.range is anywhere
