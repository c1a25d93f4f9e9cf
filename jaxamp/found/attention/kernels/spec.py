"""Parameters of an attention, apart from its arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxamp.found.attention.kernels.known_masks import KnownMask
from jaxamp.jaxprs.contracted import OTHERS


class Operands(NamedTuple):
    """Arrays of a pass of an attention, or their types; the last three are a backward pass's."""

    q: Any  # queries [*b, T, N, H]
    k: Any  # keys [*b, S, K, H]
    v: Any  # values [*b, S, K, V]
    bias: Any = None  # added to scores; broadcasts to [*b, N, T, S]
    out: Any = None  # the output [*b, T, N, V]
    # The logarithm of the sum of exponentials of each row, f32[*b, N, T]; in an equation its bits.
    lse: Any = None
    dout: Any = None  # the cotangent of the output

    @property
    def given(self) -> list[Any]:
        """Return those that an equation has."""
        return [x for x in self if x is not None]


def operands_of(values: Sequence[Any], *, backward: bool) -> Operands:
    """Return what an equation has, by name.

    >>> operands_of(["q", "k", "v", "out", "lse", "dout"], backward=True).bias is None
    True
    """
    bias = values[3] if len(values) in (4, 7) else None
    return Operands._make([*values[:3], bias, *(values[-3:] if backward else (None,) * 3)])


def bits_of(lse: Any) -> Any:
    """Return how sums of rows travel in a program: as bits, for no policy rounds integers."""
    return lax.bitcast_convert_type(lse.astype(jnp.float32), jnp.uint32)


def of_bits(bits: Any) -> Any:
    """Return the sums of rows that travel as bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


@dataclass(frozen=True)
class AttentionSpec:
    """Static parameters of an attention: its scale, and which keys a query sees."""

    scale: float
    causal: bool = False  # query i sees the keys j <= i alone
    window: int | None = None  # and of these those with i - j < window alone
    mask: KnownMask | None = None  # and those alone that this says

    def seen(self, queries: int, keys: int) -> Any:
        """Return bool[queries, keys], which keys a query sees; ``None`` if it sees all."""
        own = None if self.mask is None else self.mask.seen()
        if not self.causal:
            return own
        query = lax.broadcasted_iota(jnp.int32, (queries, keys), 0)
        key = lax.broadcasted_iota(jnp.int32, (queries, keys), 1)
        seen = key <= query
        seen = seen if self.window is None else seen & (query - key < self.window)
        return seen if own is None else seen & own


_PRODUCTS = {
    "attention_forward": (1, 1),
    "attention_backward": (3, 2),  # scores are computed again
}
"""Per primitive, how many products it has along the size of a key and along that of a value."""


def _multiplied(along_keys: int, along_values: int, ins: Sequence[Any]) -> int:
    """Count what such products multiply; masks skip none of it."""
    q, k, v = (x.shape for x in ins[:3])
    return math.prod(q[:-1]) * k[-3] * (along_keys * q[-1] + along_values * v[-1])


OTHERS.update({name: partial(_multiplied, *products) for name, products in _PRODUCTS.items()})
