"""Interface of a platform's fused kernel, and merging of batch axes into the one it takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxamp.found.attention.kernels.composed import sum_to
from jaxamp.found.attention.kernels.spec import (
    AttentionSpec,
    Operands,
    bits_of,
    of_bits,
    operands_of,
)

Form = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Fused:
    """One fused attention. Its operands have one batch axis: q [B, T, N, H], bias [1 or B, ...]."""

    name: str  # in messages
    # Why it cannot take operands; the last argument says whether the backward pass is asked for.
    obstacle: Callable[[Operands, AttentionSpec, bool], str | None]
    # The output and `lse`; of operands of a backward pass the cotangents of q, k, v and of a bias,
    # if the last argument says that it has one.
    run: Callable[[Operands, AttentionSpec, bool], tuple[Any, ...]]


def form_of(kernel: Fused, spec: AttentionSpec, bias_grad: bool | None) -> Form:
    """Return a pass by a kernel as a function of the primitive's operands.

    `bias_grad` is ``None`` for a forward pass.
    """

    def run(*values: Any) -> tuple[Any, ...]:
        operands = operands_of(values, backward=bias_grad is not None)
        batch = operands.q.shape[:-3]
        *found, last = kernel.run(_flat_operands(operands), spec, bool(bias_grad))
        found = [x.reshape(*batch, *x.shape[1:]) for x in found]
        if bias_grad is None:
            return (*found, bits_of(last.reshape(*batch, *last.shape[1:])))
        if not bias_grad:
            return tuple(found)
        whole = last.reshape(*_batch_of(operands), *last.shape[1:])
        return (*found, sum_to(whole, operands.bias))

    return run


def flattened(operands: Operands) -> Operands:
    """Return the types of operands with one batch axis, from arrays or avals."""
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
    return jax.eval_shape(_flat_operands, types)


def by_heads(x: Any) -> Any:
    """Return an array [B, T, N, ...], words before heads, the other way round, or back."""
    return jnp.swapaxes(x, 1, 2)


def _flat(x: Any) -> Any:
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _flat_operands(operands: Operands) -> Operands:
    bias, lse = operands.bias, operands.lse
    if bias is not None:
        bias = jnp.broadcast_to(bias, (*_batch_of(operands), *bias.shape[-3:]))
    flat = jax.tree.map(_flat, operands._replace(bias=bias, lse=None))
    return flat if lse is None else flat._replace(lse=of_bits(lse.reshape(-1, *lse.shape[-2:])))


def _batch_of(operands: Operands) -> tuple[int, ...]:
    """Return the batch axes that a kernel reads a bias with: all, or none of them."""
    batch = operands.bias.shape[:-3]
    return batch if all(n == 1 for n in batch) else operands.q.shape[:-3]
