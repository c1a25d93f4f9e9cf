"""Recipes: which dots of a policy are quantized, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxamp.core.formats import SCALED_FORMATS, CastConfig, Precision, PrecisionLike
from jaxamp.errors import PolicyError

VALUES = frozenset(SCALED_FORMATS)

Limits = tuple[tuple[int | None, int | None], ...]


class Casts(NamedTuple):
    """The casts of a dot's operands, by what they are; ``gradient`` is ``None`` for bf16."""

    activation: CastConfig
    weight: CastConfig
    gradient: CastConfig | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Settings of the scaled dots of a policy.

    Attributes:
      weight: cast of parameters; ``None`` for that of Compute.
      backward: whether the products of the backward pass are scaled; if not they are bf16. Those of
        4-bit dots never are. Cotangents have the cast of Compute, in e5m2 where that is e4m3 with
        one scale for the tensor.
      multiple: a dot is scaled only if its sizes are multiples of this; tensor cores read 16 bytes.
      small: pairs ``(K, N)``: a dot is not scaled if it sums over at most ``K`` elements and has at
        most ``N`` output features; ``None`` for any number.
      ends: whether the first and the last of three or more successive layers are scaled.
      history: with one scale for a tensor, of how many earlier steps magnitudes are kept and give
        it; 0 takes it from the tensor itself.
      carried: whether parameters are quantized where a step makes them, for the step after it;
        needs `history`, and a step that returns its parameters first, as it takes them first.

    Raises:
      PolicyError: a cast is not scaled, or a size is not an integer.

    >>> Scaling(small=()).casts(CastConfig("f8_e4m3")).gradient
    CastConfig(out_dtype=<Precision.F8_E5M2: 'float8_e5m2'>, sf_block=None, round_sf=False)
    """

    weight: CastConfig | None = None
    backward: bool = True
    multiple: int = 16
    small: Limits = ((4096, 1024),)  # torchao's for one scale per tensor, measured on an H100
    ends: bool = False
    history: int = 0
    carried: bool = False

    def __post_init__(self) -> None:
        if self.weight is not None:
            object.__setattr__(self, "weight", _checked_cast(self.weight))
        if type(self.multiple) is not int or self.multiple < 1:
            raise PolicyError(f"multiple is a positive integer, not {self.multiple!r}.")
        if type(self.history) is not int or self.history < 0:
            raise PolicyError(f"history is a number of steps, not {self.history!r}.")
        if self.carried and not self.history:
            raise PolicyError(
                "Parameters are carried in the history of a step: carried=True needs history=1024, "
                "say, as FP8_DELAYED has it."
            )
        object.__setattr__(self, "small", _checked_limits(self.small))

    def casts(self, compute: CastConfig) -> Casts:
        """Return the casts of a dot's operands under a cast of Compute."""
        gradient: CastConfig | None = compute
        if not self.backward or compute.out_dtype is Precision.F4_E2M1:
            gradient = None
        elif compute.out_dtype is Precision.F8_E4M3 and compute.sf_block is None:
            gradient = dataclasses.replace(compute, out_dtype=Precision.F8_E5M2)
        return Casts(compute, self.weight or compute, gradient)

    def replace(self, **changes: Any) -> Scaling:
        """Return a recipe with some attributes changed.

        Raises:
          PolicyError: no such attribute, or a value that is not understood.
        """
        fields = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in fields:
                raise PolicyError(f"A scaling has no {name!r}. Accepted: {', '.join(fields)}.")
        return dataclasses.replace(self, **changes)


def _checked_cast(cast: CastConfig | PrecisionLike) -> CastConfig:
    cast = cast if isinstance(cast, CastConfig) else CastConfig(cast)
    if cast.out_dtype not in VALUES:
        words = ", ".join(sorted(p.short for p in VALUES))
        raise PolicyError(f"The weight of a scaling is cast to {words}, not {cast}.")
    return cast


def _checked_limits(limits: Any) -> Limits:
    pairs = tuple(map(tuple, limits)) if isinstance(limits, Iterable) else None
    if pairs is None or any(
        len(pair) != 2 or any(n is not None and type(n) is not int for n in pair) for pair in pairs
    ):
        raise PolicyError(f"small is pairs (K, N) of integers or None, not {limits!r}.")
    return pairs


DEFAULT = Scaling()
