"""quantize and dequantize against an oracle in numpy, bit by bit."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxamp import CastConfig
from jaxamp.errors import PolicyError
from jaxamp.quantized.lowp import ScaledArray, dequantize, quantize
from jaxamp.quantized.lowp.scaled_array import factors
from tests.quantized.lowp import oracle

FORMATS = {"f8_e4m3": oracle.E4M3, "f8_e5m2": oracle.E5M2, "f4_e2m1": oracle.E2M1}
BLOCKS = [None, (1, 128), (128, 128), (1, 32), (1, 16), (3, 5)]
CASTS = [CastConfig(f, b, r) for f, b, r in itertools.product(FORMATS, BLOCKS, [False, True])]


def bits(x):
    """The bits of an array; 4-bit values one to a byte."""
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def unpacked(q):
    """Scales and values as float32 arrays."""
    return factors(q), dequantize(q, np.float32)


@functools.partial(jax.jit, static_argnums=1, compiler_options=oracle.ROUNDED_ONCE)
def quantize_each(x, casts):
    """What several casts make of an array, in one program: compiling is what takes the time."""
    made = [quantize(x, cast) for cast in casts]
    return made, [unpacked(q) for q in made]


def assert_as_oracle(x, *casts):
    """Values, scales and what they stand for have the oracle's bits."""
    for cast, got, pair in zip(casts, *quantize_each(x, casts), strict=True):
        assert_one_as_oracle(x, cast, got, pair)


def assert_one_as_oracle(x, cast, got, pair):
    dtype = FORMATS[cast.out_dtype.short]
    values, scales = oracle.quantize(x, dtype, cast.sf_block, cast.round_sf)
    got_scales, got_numbers = map(np.asarray, pair)
    np.testing.assert_array_equal(bits(got.values), bits(values))
    np.testing.assert_array_equal(got_scales.reshape(scales.shape), scales)
    numbers = oracle.dequantize(values, scales, cast.sf_block)
    np.testing.assert_array_equal(got_numbers, flushed(numbers, got_numbers))


def flushed(expected, got):
    """Subnormal results may be flushed: the backend decides."""
    small = (np.abs(expected) < np.finfo(np.float32).smallest_normal) & (got == 0)
    return np.where(small, got, expected)


def hostile(shape, dtype=np.float32):
    """Magnitudes over the whole range of f32, zeros of both signs and subnormal numbers."""
    rng = np.random.default_rng(shape[0])
    x = rng.normal(size=shape) * 10.0 ** rng.integers(-44, 38, size=shape)
    x = np.where(rng.random(shape) < 0.2, 0.0, x) * rng.choice([-1, 1], size=shape)
    x[0, : shape[1] // 2] = 1e-40
    return np.clip(x, -3e38, 3e38).astype(dtype)


@pytest.mark.product("name", every=2)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(130, 129), (128, 256)], ids=["ragged", "whole"])
def test_every_format_block_and_rounding(name, shape):
    """Blocks that divide the array and blocks that do not, with magnitudes of all sizes."""
    assert_as_oracle(hostile(shape), *[c for c in CASTS if c.out_dtype.short == name])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_input(dtype):
    """What comes in 16 bits is widened first; the result remembers its dtype."""
    x = np.random.default_rng(0).normal(size=(4, 96)).astype(dtype)
    assert_as_oracle(x, CastConfig("f8_e4m3"), CastConfig("f8_e4m3", (1, 32)))
    assert dequantize(quantize(x, "f8_e4m3")).dtype == np.dtype(dtype)


SPECIAL = [0.0, -0.0, 1e-45, -1e-39, 2.0**-126, 448.0, 449.0, 3.4e38, np.inf, -np.inf, np.nan]
NUMBERS = st.one_of(st.floats(width=32), st.sampled_from(SPECIAL))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(x=hnp.arrays(np.float32, st.just((3, 135)), elements=NUMBERS, fill=NUMBERS))
def test_special_numbers(x):
    """Zeros, subnormal numbers, infinities and NaN, mixed at will, ragged in every block."""
    assert_as_oracle(x, *CASTS)


def test_one_axis():
    """A vector is one row."""
    assert_as_oracle(hostile((1, 70))[0], *[c for c in CASTS if c.sf_block in (None, (1, 16))])


def test_jit_changes_nothing():
    """Run operation by operation, the bits are the same."""
    x, cast = hostile((5, 33)), CastConfig("f8_e4m3", (3, 5))
    made = quantize(x, cast)
    assert_one_as_oracle(x, cast, made, unpacked(made))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("culprit", [np.inf, -np.inf, np.nan])
def test_nonfinite_blocks_are_nan_and_only_they(name, culprit):
    """An overflow is not hidden, and its neighbours are not harmed."""
    x = np.ones((2, 8), np.float32)
    x[1, 5] = culprit
    got = np.asarray(dequantize(quantize(x, CastConfig(name, (1, 4), True))))
    np.testing.assert_array_equal(np.isnan(got), [[False] * 8, [False] * 4 + [True] * 4])
    np.testing.assert_array_equal(got[0], 1.0)


def test_zeros_stay_zero():
    """A block of zeros has a scale like any other and comes back as zeros."""
    for scales, numbers in quantize_each(np.zeros((3, 40), np.float32), tuple(CASTS[::5]))[1]:
        assert np.all(np.asarray(scales) > 0)
        np.testing.assert_array_equal(numbers, 0)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("round_sf", [False, True])
def test_error_is_within_half_a_step(name, round_sf):
    """No value is off by more than half a unit in its last place, or half the smallest number."""
    x = np.random.default_rng(1).normal(size=(8, 256)).astype(np.float32)
    cast = CastConfig(name, (1, 64), round_sf) if round_sf else CastConfig(name)
    q = quantize(x, cast)
    scale = np.repeat(np.asarray(factors(q)), 64, -1) if round_sf else np.asarray(factors(q))
    info = ml_dtypes.finfo(FORMATS[name])
    step = np.maximum(np.abs(x) * float(info.eps), scale * float(info.smallest_subnormal))
    assert np.all(np.abs(np.asarray(dequantize(q)) - x) <= step / 2 * (1 + 1e-6))


@pytest.mark.parametrize("wrap", [lambda f: jax.vmap(f), lambda f: lambda x: jax.lax.map(f, x)])
@pytest.mark.parametrize("cast", [CASTS[2], CASTS[-4]], ids=str)
def test_stacks_of_tensors(cast, wrap):
    """Under vmap and scan each tensor has scales of its own, and the stack can be dequantized."""
    x = hostile((12, 70)).reshape(3, 4, 70)
    stacked = jax.jit(wrap(lambda t: quantize(t, cast)))(x)
    want = np.stack([quantize_each(t, (cast,))[1][0][1] for t in x])
    np.testing.assert_array_equal(unpacked(stacked)[1], want)


def test_a_pytree():
    """Flattened and put together again it is the same array, and jit takes and returns it."""
    q = quantize(jnp.ones((2, 32)), CastConfig("f4_e2m1", (1, 16)))
    leaves, tree = jax.tree.flatten(q)
    assert [leaf.dtype for leaf in leaves] == ["float4_e2m1fn", "float8_e4m3fn", "float32"]
    again = jax.jit(lambda a: a)(jax.tree.unflatten(tree, leaves))
    assert isinstance(again, ScaledArray)
    assert (again.cast, again.dtype, again.shape) == (q.cast, q.dtype, (2, 32))


def test_scales_are_stored_small():
    """Powers of two take a byte, those of NVFP4 a byte and one float32, others four bytes."""

    def scale(cast):
        return jax.eval_shape(lambda x: quantize(x, cast), np.ones((4, 64), np.float32)).scale

    assert scale(CastConfig("f8_e4m3", (1, 32), True)).dtype == jnp.float8_e8m0fnu
    assert scale(CastConfig("f4_e2m1", (1, 16))).values.dtype == jnp.float8_e4m3fn
    assert scale(CastConfig("f8_e5m2", (1, 32))).dtype == jnp.float32


@pytest.mark.parametrize(
    ("x", "cast", "message"),
    [
        (np.ones((2, 2), np.int32), CastConfig("f8_e4m3"), "int32"),
        (np.ones((2, 2), np.float32), CastConfig("bf16"), "not a scaled format"),
        (np.ones((2, 2), np.float32), CastConfig("f8_e8m0"), "not a scaled format"),
        (np.ones(2, np.float32), CastConfig("f8_e4m3", (2, 2)), "last two axes"),
        (np.float32(1), CastConfig("f8_e4m3", (1, 2)), "last two axes"),
    ],
)
def test_what_cannot_be_quantized_is_refused(x, cast, message):
    """Wrong dtypes, formats and shapes raise an error that says what is right."""
    with pytest.raises(PolicyError, match=message):
        quantize(x, cast)


def test_what_was_not_quantized_is_not_dequantized():
    """An array has no scale factors, and is told what has them."""
    with pytest.raises(PolicyError, match=r"a ScaledArray, not float32\[3\]"):
        dequantize(jnp.ones(3))
