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
    Results,
    bits_of,
    of_backward,
    of_bits,
)

Form = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Fused:
    """One fused attention. Its operands have one batch axis: q [B, T, N, H], bias [1 or B, ...]."""

    name: str  # in messages
    # Why it cannot take operands; the last argument says whether the backward pass is asked for.
    obstacle: Callable[[Operands, AttentionSpec, bool], str | None]
    forward: Callable[[Operands, AttentionSpec], tuple[Any, Any]]  # the output and `lse`
    # The cotangents; the last argument says whether a bias has one.
    backward: Callable[[Operands, Results, AttentionSpec, bool], tuple[Any, ...]]


def forward_form(kernel: Fused, spec: AttentionSpec) -> Form:
    """Return the forward pass by a kernel as a function of the primitive's operands."""

    def run(*values: Any) -> tuple[Any, Any]:
        operands = Operands(*values)
        out, lse = kernel.forward(_flat_operands(operands), spec)
        batch = operands.q.shape[:-3]
        return out.reshape(*batch, *out.shape[1:]), bits_of(lse.reshape(*batch, *lse.shape[1:]))

    return run


def backward_form(kernel: Fused, spec: AttentionSpec, bias_grad: bool) -> Form:
    """Return the backward pass by a kernel as a function of the primitive's operands."""

    def run(*values: Any) -> tuple[Any, ...]:
        operands, (out, bits, dout) = of_backward(values)
        rows = of_bits(bits.reshape(-1, *bits.shape[-2:]))
        results = Results(_flat(out), rows, _flat(dout))
        *found, dbias = kernel.backward(_flat_operands(operands), results, spec, bias_grad)
        found = [d.reshape(x.shape) for d, x in zip(found, operands[:3], strict=True)]
        if not bias_grad:
            return tuple(found)
        whole = dbias.reshape(*_batch_of(operands), *dbias.shape[1:])
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
    flat, bias = Operands(*map(_flat, operands[:3])), operands.bias
    if bias is None:
        return flat
    whole = jnp.broadcast_to(bias, (*_batch_of(operands), *bias.shape[-3:]))
    return flat._replace(bias=_flat(whole))


def _batch_of(operands: Operands) -> tuple[int, ...]:
    """Return the batch axes that a kernel reads a bias with: all, or none of them."""
    batch = operands.bias.shape[:-3]
    return batch if all(n == 1 for n in batch) else operands.q.shape[:-3]
