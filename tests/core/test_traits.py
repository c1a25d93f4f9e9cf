"""The arithmetic traits of the table are measured: each is a promise about rounding or slope."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives

from jaxamp.core.formats import Precision
from jaxamp.core.taxonomy import TABLE, Trait

# Each measured primitive, as a function of the numbers of a 16-bit format, in any order.
EXACT = {
    "abs": lax.abs,
    "neg": lax.neg,
    "sign": lax.sign,
    "max": lambda x: lax.max(x, _other(x)),
    "min": lambda x: lax.min(x, _other(x)),
    "clamp": lambda x: lax.clamp(_other(x), x, lax.rev(x, (0,))),
    "select_n": lambda x: lax.select_n(x > _other(x), x, _other(x)),
    "copy": jnp.copy,
    "stop_gradient": lax.stop_gradient,
    "is_finite": lax.is_finite,
    "eq": lambda x: lax.eq(x, _other(x)),
    "ne": lambda x: lax.ne(x, _other(x)),
    "lt": lambda x: lax.lt(x, _other(x)),
    "le": lambda x: lax.le(x, _other(x)),
    "gt": lambda x: lax.gt(x, _other(x)),
    "ge": lambda x: lax.ge(x, _other(x)),
    "eq_to": lambda x: primitives.eq_to_p.bind(x, _other(x)),
    "lt_to": lambda x: primitives.lt_to_p.bind(x, _other(x)),
    "le_to": lambda x: primitives.le_to_p.bind(x, _other(x)),
}
INTEGRAL = {
    "ceil": lax.ceil,
    "floor": lax.floor,
    "round": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
}
ROUNDED = {
    "add": lambda x: lax.add(x, _other(x)),
    "sub": lambda x: lax.sub(x, _other(x)),
    "mul": lambda x: lax.mul(x, _other(x)),
    "div": lambda x: lax.div(x, _other(x)),
    "sqrt": lax.sqrt,
}
# All of EXTREMUM but those between devices and in derivatives of pooling.
EXTREMUM = {
    "reduce_max": lambda x: x.reshape(-1, 64).max(0),
    "reduce_min": lambda x: x.reshape(-1, 64).min(0),
    "argmax": lambda x: lax.argmax(x.reshape(-1, 64), 0, np.int32),
    "argmin": lambda x: lax.argmin(x.reshape(-1, 64), 0, np.int32),
    "cummax": lax.cummax,
    "cummin": lax.cummin,
    "sort": lax.sort,
    "top_k": lambda x: lax.top_k(x, 64)[0],
    "scatter-max": lambda x: x[:64].at[jnp.arange(256) % 64].max(x[-256:]),
    "scatter-min": lambda x: x[:64].at[jnp.arange(256) % 64].min(x[-256:]),
    "reduce_window_max": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (4,), (1,), "VALID"),
    "reduce_window_min": lambda x: lax.reduce_window(x, jnp.inf, lax.min, (4,), (1,), "VALID"),
}
NEVER_ROUNDS = EXACT | INTEGRAL | EXTREMUM
MEASURED: dict[str, Callable] = NEVER_ROUNDS | ROUNDED

# Curves over both signs and many sizes of x.
SMOOTH = {
    "tanh": lax.tanh,
    "logistic": lax.logistic,
    "erf": lax.erf,
    "atan": lax.atan,
    "asinh": lax.asinh,
    "bessel_i0e": lax.bessel_i0e,
    "bessel_i1e": lax.bessel_i1e,
}
SENSITIVE = {
    "exp": lax.exp,
    "exp2": lax.exp2,
    "expm1": lax.expm1,
    "log": lax.log,
    "log1p": lax.log1p,
    "pow": lambda x: lax.pow(x, jnp.float32(3)),
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "square": lax.square,
    "rsqrt": lax.rsqrt,
    "cbrt": lax.cbrt,
    "rem": lambda x: lax.rem(x, jnp.ones_like(x)),
    "sin": lax.sin,
    "cos": lax.cos,
    "tan": lax.tan,
    "sinh": lax.sinh,
    "cosh": lax.cosh,
    "asin": lax.asin,
    "acos": lax.acos,
    "acosh": lax.acosh,
    "atanh": lax.atanh,
    "atan2": lambda x: lax.atan2(x, jnp.full_like(x, 1e-3)),
    "erfc": lax.erfc,
    "erf_inv": lax.erf_inv,
    "lgamma": lax.lgamma,
    "digamma": lax.digamma,
    "polygamma": lambda x: lax.polygamma(jnp.ones_like(x), x),
    "zeta": lambda x: lax.zeta(x, jnp.ones_like(x)),
    "igamma": lambda x: lax.igamma(jnp.full_like(x, 0.1), x),
    "igammac": lambda x: lax.igammac(jnp.full_like(x, 0.1), x),
    "igamma_grad_a": lambda x: lax.igamma_grad_a(jnp.full_like(x, 0.1), x),
    "regularized_incomplete_beta": lambda x: lax.betainc(jnp.full_like(x, 0.1), x + 1, x),
}
NEWER_THAN_FLOOR = {"log2", "one_minus_square", "polynomial"}


def _other(x: jax.Array) -> jax.Array:
    """A second operand: the same numbers, each next to another one."""
    return jnp.roll(x, 12345)


def every_number(precision: Precision) -> np.ndarray:
    """All numbers of a 16-bit format that mean the same everywhere, shuffled; infinities too.

    Not the NaNs, of which XLA's maximum may lose some, nor the subnormals, which it may flush.
    """
    bits = np.random.default_rng(0).permutation(2**16).astype(np.uint16)
    numbers = bits.view(precision.dtype)
    wide = numbers.astype(np.float32)
    whole = numbers[(np.abs(wide) >= precision.smallest_normal) | (wide == 0)]
    return whole[: len(whole) // 64 * 64]


@functools.cache
def low_and_wide(name: str, precision: Precision) -> tuple[np.ndarray, np.ndarray]:
    """The results of a measured primitive in 16 bits and in float32, on the same numbers."""
    fn, x = jax.jit(MEASURED[name]), every_number(precision)
    return np.asarray(fn(x)), np.asarray(fn(x.astype(np.float32)))


@np.errstate(all="ignore")
def rounded(wide: np.ndarray, like: np.ndarray) -> np.ndarray:
    """The float32 results rounded once to the other's dtype."""
    return wide.astype(like.dtype)


@np.errstate(all="ignore")
def assert_same_bits(a: np.ndarray, b: np.ndarray):
    """Equal bit by bit, signs of zero included; any NaN equals any other."""
    assert a.dtype == b.dtype
    differ = (a.view(np.uint8) != b.view(np.uint8)).reshape(a.size, -1).any(1) & ~(
        (a != a) & (b != b)
    )
    assert not differ.any(), f"{differ.sum()} differ, e.g. {a[differ][:3]} and {b[differ][:3]}"


def by_trait(trait: Trait) -> set[str]:
    return {name for name, op in TABLE.items() if op.trait is trait} - NEWER_THAN_FLOOR


@pytest.mark.parametrize("trait", ["EXACT", "INTEGRAL", "ROUNDED", "SMOOTH", "SENSITIVE"])
def test_every_elementwise_primitive_is_measured(trait):
    """Each primitive of an arithmetic trait has a program here, and under its own trait."""
    assert globals()[trait].keys() == by_trait(Trait[trait])


@pytest.mark.product("name")
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.F16])
@pytest.mark.parametrize("name", MEASURED)
def test_low_arithmetic_is_float32_rounded_once(name, precision):
    """On every 16-bit number, 16-bit arithmetic gives the float32 result rounded once."""
    low, wide = low_and_wide(name, precision)
    assert_same_bits(low, rounded(wide, low))


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.F16])
@pytest.mark.parametrize("name", NEVER_ROUNDS)
def test_exact_arithmetic_never_rounds(name, precision):
    """On every 16-bit number, the float32 result fits the 16-bit format."""
    low, wide = low_and_wide(name, precision)
    assert_same_bits(rounded(wide, low).astype(wide.dtype), wide)


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.F16])
@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_arithmetic_does_round(name, precision):
    """ROUNDED is no other word for EXACT: some float32 results do not fit."""
    low, wide = low_and_wide(name, precision)
    assert not np.array_equal(rounded(wide, low).astype(wide.dtype), wide, equal_nan=True)


@functools.cache
def slopes(name: str) -> list[float]:
    """The largest slope, error from a relative error of x, and relative such error of a curve."""
    x = np.geomspace(1e-3, 50, 2000, dtype=np.float32)
    x = np.concatenate([-x[::-1], x])
    y = np.asarray(jax.jit((SMOOTH | SENSITIVE)[name])(x))
    with np.errstate(all="ignore"):
        slope = np.abs(np.diff(y) / np.diff(x))
        y, moved = np.abs(y[1:]), np.abs(x[1:]) * slope
        curves = slope, moved / np.maximum(y, 1), moved / y
    return [float(c[np.isfinite(c)].max()) for c in curves]


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_curves_pass_errors_on_unamplified(name):
    """A SMOOTH curve is nowhere steep, and a relative error of x costs no more than that."""
    steepness, error, _ = slopes(name)
    assert steepness < 1.2
    assert error < 1


@pytest.mark.parametrize("name", SENSITIVE)
def test_sensitive_curves_amplify_errors(name):
    """A SENSITIVE curve is steep somewhere, or magnifies a relative error."""
    steepness, _, relative_error = slopes(name)
    assert max(steepness, relative_error) > 1.2
