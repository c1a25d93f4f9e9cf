"""Float formats and casts: their numbers, their spellings, their errors."""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxamp.core.formats import CastConfig, Precision
from jaxamp.errors import JaxAmpError, PolicyError

NUMBERS = {  # max, eps, smallest normal, smallest subnormal, bits, significand bits
    Precision.F64: (1.7976931348623157e308, 2**-52, 2.0**-1022, 2.0**-1074, 64, 53),
    Precision.F32: ((2 - 2**-23) * 2.0**127, 2**-23, 2**-126, 2**-149, 32, 24),
    Precision.F16: (65504, 2**-10, 2**-14, 2**-24, 16, 11),
    Precision.BF16: ((2 - 2**-7) * 2.0**127, 2**-7, 2**-126, 2**-133, 16, 8),
    Precision.F8_E4M3: (448, 2**-3, 2**-6, 2**-9, 8, 4),
    Precision.F8_E5M2: (57344, 2**-2, 2**-14, 2**-16, 8, 3),
    Precision.F8_E8M0: (2.0**127, 1, 2**-127, 2**-127, 8, 1),
    Precision.F4_E2M1: (6, 2**-1, 1, 0.5, 4, 2),
}


@pytest.mark.parametrize("precision", Precision)
def test_numbers(precision):
    """Every format has the numbers of its definition, and they are Python numbers."""
    seen = (
        precision.max,
        precision.eps,
        precision.smallest_normal,
        precision.smallest_subnormal,
        precision.bits,
        precision.mantissa_bits,
    )
    assert seen == NUMBERS[precision]
    assert [type(n) for n in seen] == [float] * 4 + [int] * 2


@pytest.mark.parametrize("precision", [p for p in Precision if p is not Precision.F64])
def test_mantissa_bits_bound_the_exact_integers(precision):
    """Integers up to 2**mantissa_bits survive a cast; the next one does not."""
    bound = 2**precision.mantissa_bits
    exact = {1, 2, bound} if precision is Precision.F8_E8M0 else {1, bound - 1, bound}
    assert all(int(np.float64(n).astype(precision.dtype)) == n for n in exact)
    assert int(np.float64(bound + 1).astype(precision.dtype)) != bound + 1


@pytest.mark.parametrize("precision", Precision)
def test_parse_reads_every_spelling(precision):
    """Short word, dtype name, dtype, scalar type and the precision itself mean the same."""
    spellings = [precision, precision.short, precision.name, f" {precision.value} "]
    spellings += [precision.value, precision.dtype, precision.dtype.type]
    assert {Precision.parse(s) for s in spellings} == {precision}


@pytest.mark.parametrize("scalar", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e5m2])
def test_parse_reads_jax_scalar_types(scalar):
    """``jnp.bfloat16`` and its like are read."""
    assert Precision.parse(scalar).dtype == jnp.dtype(scalar)


def test_full_and_half_are_those_of_jmp(monkeypatch):
    """``full`` is f32; ``half`` is bf16 on TPU and f16 elsewhere."""
    assert Precision.parse("full") is Precision.F32
    for backend, half in (("tpu", Precision.BF16), ("gpu", Precision.F16), ("cpu", Precision.F16)):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        assert Precision.parse("half") is half


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("fp_16", "'fp16'"),
        ("bflaot16", "'bfloat16'"),
        ("float8_e4m3", "'float8_e4m3fn'"),
        ("int8", "Accepted: f64, f32"),
        (np.int32, "Accepted: f64, f32"),
        (jnp.complex64, "Accepted: f64, f32"),
        (np.dtype(ml_dtypes.float8_e4m3), "'float8_e4m3fn'"),
        (float, "Accepted: f64, f32"),
        (None, "Accepted: f64, f32"),
        (3.5, "Accepted: f64, f32"),
        (object(), "Accepted: f64, f32"),
    ],
)
def test_parse_refuses_with_a_hint(word, hint):
    """A word that names no format is refused, and the message helps."""
    with pytest.raises(PolicyError) as caught:
        Precision.parse(word)
    assert hint in str(caught.value)
    assert isinstance(caught.value, (JaxAmpError, ValueError))


@pytest.mark.parametrize(
    "dtype",
    [np.dtype("int8"), np.dtype("bool"), np.dtype("complex64"), np.dtype(ml_dtypes.float8_e4m3)],
)
def test_of_dtype_knows_only_its_floats(dtype):
    """Other dtypes have no precision."""
    assert Precision.of_dtype(dtype) is None


def test_of_dtype_reads_avals():
    """The dtype of an abstract value is read, that of a key array is no float."""
    assert Precision.of_dtype(jax.typeof(jnp.ones(2, "bfloat16")).dtype) is Precision.BF16
    assert Precision.of_dtype(jax.random.key(0).dtype) is None


@pytest.mark.parametrize("word", ["f32", np.float32, Precision.F32, jnp.float32])
def test_cast_reads_words(word):
    """A cast takes any spelling, and equal casts are equal and hash alike."""
    assert CastConfig(word) == CastConfig.plain(Precision.F32)
    assert hash(CastConfig(word)) == hash(CastConfig.plain("float32"))


@pytest.mark.parametrize(
    "block", [(1,), (1, 0), (-1, 8), "ab", 128, (1.0, 2), (1, 2, 3), (True, 1)]
)
def test_wrong_block_is_refused(block):
    """A block is a pair of positive integers."""
    with pytest.raises(PolicyError, match="sf_block"):
        CastConfig("f8_e4m3", sf_block=block)


def test_block_is_normalised_to_a_hashable_pair():
    """A list given as block becomes a tuple, so that the cast can be hashed."""
    cast = CastConfig("f8_e4m3", sf_block=[1, 128])  # pyright: ignore[reportArgumentType]
    assert cast == CastConfig("f8_e4m3", sf_block=(1, 128))
    assert hash(cast) == hash(CastConfig("f8_e4m3", sf_block=(1, 128)))


def test_rounded_scale_needs_scales():
    """``round_sf`` without a block says nothing and is refused."""
    with pytest.raises(PolicyError, match="round_sf"):
        CastConfig("bf16", round_sf=True)


@pytest.mark.parametrize("value", [*Precision, CastConfig("f8_e5m2", (128, 128), True)])
def test_copies_are_equal(value):
    """Pickle and deepcopy give an equal value."""
    assert pickle.loads(pickle.dumps(value)) == value == copy.deepcopy(value)


def test_cast_is_frozen():
    """A cast cannot be changed in place."""
    with pytest.raises(AttributeError):
        CastConfig("bf16").out_dtype = Precision.F32  # pyright: ignore[reportAttributeAccessIssue]
