"""Rows of scores that see no key: what they give in the program, and kernels do not give.

Where a mask replaces all scores of a row by one number, weights are equal, or NaN if that is minus
infinity, or zeros if they are masked again, and no cotangent reaches the scores. Where so low a
number is added to them that they vanish in its float32 rounding, weights are equal too, but scores
have cotangents. A kernel keeps the logarithm of a sum of exponentials, which is no number next to
-1e9: so it is given queries and a bias that are zero in such rows, and what it then lacks is added
to what it returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

VANISHING = -(2.0**27)
"""Scores that are added to such a bias vanish in its float32 rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class EmptyRows:
    """Rows that see nothing, bool[*b, T, N, 1] beside queries [*b, T, N, H]; ``None`` for none."""

    queries: Any  # as the program has them
    masked: Any = None  # rows that masks hide whole
    infinite: Any = None  # those of them whose weights are NaN
    vanished: Any = None  # rows whose scores vanish next to a bias
    flat: Any = None  # those of them where that is one number, in which no key is masked
    is_zeroed: bool = False  # whether rows that are masked whole have weights of zero

    @property
    def given(self) -> Any:
        """The queries that a kernel is given; those whose scores vanish keep their cotangent."""
        q = self.queries
        if self.vanished is not None:
            q = jnp.where(self.vanished, q - lax.stop_gradient(q), q)
        return q if self.masked is None else jnp.where(self.masked, jnp.zeros((), q.dtype), q)

    def completed(self, out: Any, k: Any, v: Any, scale: float) -> Any:
        """Return the output of the program, and its cotangents, from a kernel's for `given`."""
        if self.is_zeroed and self.masked is not None:
            out = jnp.where(self.masked, jnp.zeros((), out.dtype), out)
        elif self.infinite is not None:
            total = jnp.sum(v, axis=-3, keepdims=True)  # so that all values have a cotangent of NaN
            total = jnp.repeat(total, out.shape[-2] // v.shape[-2], axis=-2)
            nowhere = jnp.where(self.infinite, jnp.nan, 0.0).astype(out.dtype)
            out = jnp.where(self.infinite, nowhere * total, out)
        if self.flat is not None:
            queries = jnp.where(self.flat, self.queries, 0.0) * (scale / k.shape[-3])
            apart = v - jnp.mean(v, axis=-3, keepdims=True)
            out = out + _unseen(k, *map(lax.stop_gradient, (queries, apart)))
        return out

    @property
    def is_complete(self) -> bool:
        """Return whether the output of a kernel is that of the program, with its cotangents."""
        return self.infinite is None and self.flat is None and not self.is_zeroed


@jax.custom_jvp
def _unseen(k: Any, queries: Any, apart: Any) -> Any:
    """Return zero, whose derivative along keys is that of equal weights."""
    return jnp.zeros((*queries.shape[:-1], apart.shape[-1]), queries.dtype)


@_unseen.defjvp
def _along_keys(primals: Any, tangents: Any) -> tuple[Any, Any]:
    k, queries, apart = primals
    groups = queries.reshape(*queries.shape[:-2], k.shape[-2], -1, queries.shape[-1])
    products = jnp.einsum("...skh,...skv->...khv", tangents[0], apart)
    moved = jnp.einsum("...tkgh,...khv->...tkgv", groups, products)
    zero = _unseen(k, queries, apart)
    return zero, moved.reshape(zero.shape)
