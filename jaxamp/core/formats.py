"""Float formats and the way a value is cast to one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import jax
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from jaxamp.core.enum_words import Word
from jaxamp.errors import PolicyError, accepted, shown


class Precision(Word):
    """A float format; the value is the name of its dtype.

    Attributes:
      dtype: the numpy dtype of the format.
      short: the short word, as in ``"bf16"``, that ``parse`` reads back.
      max: the largest finite number.
      eps: the distance from 1 to the next larger number.
      smallest_normal: the smallest positive number of full relative accuracy.
      smallest_subnormal: the smallest positive number at all.
      bits: the width of the format in bits.
      mantissa_bits: bits of the significand, the implicit one included; integers up to 2**this
        are exact.

    >>> Precision.BF16.dtype, Precision.BF16.mantissa_bits, Precision.F16.max
    (dtype(bfloat16), 8, 65504.0)
    """

    F64 = "float64"
    F32 = "float32"
    F16 = "float16"
    BF16 = "bfloat16"
    F8_E4M3 = "float8_e4m3fn"
    F8_E5M2 = "float8_e5m2"
    F8_E8M0 = "float8_e8m0fnu"  # powers of two only: a scale, never a value
    F4_E2M1 = "float4_e2m1fn"

    def __init__(self, name: str) -> None:
        self.dtype = np.dtype(getattr(ml_dtypes, name, name))
        facts = ml_dtypes.finfo(self.dtype)
        self.short = self.name.lower()
        self.max = float(facts.max)
        self.eps = float(facts.eps)
        self.smallest_normal = float(facts.smallest_normal)
        self.smallest_subnormal = float(facts.smallest_subnormal)
        self.bits = int(facts.bits)
        self.mantissa_bits = int(facts.nmant) + 1

    @classmethod
    def parse(cls, word: PrecisionLike) -> Precision:
        """Read a precision from any of its usual spellings.

        Args:
          word: a ``Precision``, a name (``"bf16"``, ``"bfloat16"``), ``"full"`` (f32),
            ``"half"`` (as jmp has it: bf16 on TPU, f16 elsewhere), or a dtype such as
            ``jnp.bfloat16`` or ``np.dtype("float16")``.

        Raises:
          PolicyError: the word names no float format of jaxamp.

        >>> Precision.parse("bf16"), Precision.parse(np.float32)
        (<Precision.BF16: 'bfloat16'>, <Precision.F32: 'float32'>)
        """
        if isinstance(word, cls):
            return word
        if isinstance(word, str):
            return _parse_name(word)
        name = _dtype_name(word)
        if name in _NAMES:
            return _NAMES[name]
        raise PolicyError(
            f"{shown(word)} is not a float format of jaxamp. {accepted(name, _NAMES)}"
        )

    @classmethod
    def of_dtype(cls, dtype: Any) -> Precision | None:
        """Return the format of a dtype; ``None`` for integers, complex, keys and foreign floats.

        Args:
          dtype: a dtype object, extended ones included, as ``aval.dtype`` gives it.

        >>> Precision.of_dtype(np.dtype("float16")), Precision.of_dtype(np.dtype("int32"))
        (<Precision.F16: 'float16'>, None)
        """
        return _BY_DTYPE.get(dtype)


PrecisionLike: TypeAlias = Precision | DTypeLike  # what Precision.parse reads

_NAMES: dict[str, Precision] = {
    **{precision.short: precision for precision in Precision},
    **{precision.value: precision for precision in Precision},
    "full": Precision.F32,
    "fp16": Precision.F16,  # as PyTorch's users write them
    "fp32": Precision.F32,
}


SCALED_FORMATS = Precision.F8_E4M3, Precision.F8_E5M2, Precision.F4_E2M1
"""Formats that a scaled cast can have."""

_NARROW = frozenset(p for p in Precision if p.bits < Precision.F32.bits)


def is_narrow(precision: Precision | None) -> TypeGuard[Precision]:
    """Return whether a precision is one of fewer bits than f32; ``None`` is not.

    >>> is_narrow(Precision.BF16), is_narrow(Precision.F32), is_narrow(None)
    (True, False, False)
    """
    return precision in _NARROW


def is_format_name(text: str) -> bool:
    """Return whether ``Precision.parse`` reads the text."""
    return text.strip().lower() in format_names()


def is_format(dtype: Any) -> TypeGuard[PrecisionLike]:
    """Return whether something is a dtype of a float format, or a ``Precision``; no text is.

    >>> is_format(np.float16), is_format("bf16"), is_format(int)
    (True, False, False)
    """
    named = isinstance(dtype, Precision | np.dtype | type)
    return named and (isinstance(dtype, Precision) or _dtype_name(dtype) in _NAMES)


def format_names() -> tuple[str, ...]:
    """Return the texts that ``Precision.parse`` reads."""
    return *_NAMES, "half"


def _parse_name(word: str) -> Precision:
    name = word.strip().lower()
    if name == "half":
        return Precision.BF16 if jax.default_backend() == "tpu" else Precision.F16
    if name not in _NAMES:
        raise PolicyError(f"Unknown precision {word!r}. {accepted(name, format_names())}")
    return _NAMES[name]


def _dtype_name(word: Any) -> str:
    """Return the name of a dtype-like; empty for what is not a dtype.

    ``float`` is refused on purpose: it is float64 to numpy and float32 to JAX.
    """
    if word is None or word is float:
        return ""
    try:
        return np.dtype(word).name
    except (TypeError, ValueError):
        return ""


_BY_DTYPE: dict[Any, Precision] = {precision.dtype: precision for precision in Precision}


@dataclasses.dataclass(frozen=True, slots=True)
class CastConfig:
    """Format of a cast: a plain dtype, or a scaled one, which 8 bits and fewer always are.

    Attributes:
      out_dtype: the format of the result; anything that ``Precision.parse`` reads.
      sf_block: ``(rows, cols)`` of a block with one scale factor; ``None`` for no blocks: one
        scale factor for the whole tensor where the format has 8 bits or fewer, else a plain cast.
      round_sf: scale factors are rounded up to powers of two.

    Raises:
      PolicyError: unknown format, a block that is not a pair of positive integers, or ``round_sf``
        where there are no scale factors.

    >>> CastConfig("bf16") == CastConfig.plain(np.dtype("bfloat16"))
    True
    >>> print(CastConfig("f8_e4m3", sf_block=(1, 128), round_sf=True), CastConfig("f8_e5m2"))
    f8_e4m3[1x128, pow2] f8_e5m2[tensor]
    """

    out_dtype: Precision
    sf_block: tuple[int, int] | None = None
    round_sf: bool = False

    if TYPE_CHECKING:  # the attribute is a Precision, but every spelling may be given

        def __init__(
            self,
            out_dtype: PrecisionLike,
            sf_block: tuple[int, int] | None = None,
            round_sf: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "out_dtype", Precision.parse(self.out_dtype))
        if self.sf_block is not None:
            object.__setattr__(self, "sf_block", _checked_block(self.sf_block))
        elif self.round_sf and not self.is_scaled:
            raise PolicyError("round_sf=True needs sf_block: a plain cast has no scale factors.")

    @classmethod
    def from_data(cls, data: str | dict[str, Any]) -> CastConfig:
        """Read what JSON holds of a cast: the word of a plain one, or its fields."""
        if isinstance(data, str):
            return cls.plain(data)
        block = data["sf_block"]
        return cls(data["out_dtype"], block and tuple(block), data["round_sf"])

    @classmethod
    def plain(cls, dtype: PrecisionLike) -> CastConfig:
        """Return a cast to one dtype, without blocks.

        >>> str(CastConfig.plain("f16"))
        'f16'
        """
        return cls(Precision.parse(dtype))

    @property
    def is_scaled(self) -> bool:
        """Return whether the cast uses scale factors."""
        return self.sf_block is not None or self.out_dtype.bits <= 8

    def __str__(self) -> str:
        if not self.is_scaled:
            return self.out_dtype.short
        block = "tensor" if self.sf_block is None else "{}x{}".format(*self.sf_block)
        return f"{self.out_dtype.short}[{block}{', pow2' if self.round_sf else ''}]"


def _checked_block(block: Any) -> tuple[int, int]:
    sizes = tuple(block) if isinstance(block, Iterable) else ()
    if len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes):
        return sizes
    raise PolicyError(f"sf_block is (rows, cols) with positive integers, not {block!r}.")
