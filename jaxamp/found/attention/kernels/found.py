"""Attention as one equation of a float32 program, before its precision is decided.

These two primitives stand for a forward and a backward pass that were found in a program. Whoever
rewrites the program emits `attention_forward_p` and `attention_backward_p` in their place, with
operands in the precision decided. The sums of rows travel as their bits: no policy rounds integers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from jaxamp.core import jax_compat
from jaxamp.core.define import define, jvp_along, typed_as
from jaxamp.core.taxonomy import OpKind, Trait
from jaxamp.found.attention.kernels.primitives import attention_backward_p, attention_forward
from jaxamp.found.attention.kernels.spec import AttentionSpec, Operands, Results

found_attention_p = Primitive("found_attention")
found_attention_backward_p = Primitive("found_attention_backward")


def found_attention(operands: Operands, spec: AttentionSpec) -> list[jax.Array]:
    """Compute attention, and the bits of `lse`, u32[*b, N, T]: of what `attention` takes."""
    return found_attention_p.bind(*jax_compat.vary_alike(operands.given), spec=spec)


def found_attention_backward(
    operands: Operands, results: Results, spec: AttentionSpec, bias_grad: bool
) -> list[jax.Array]:
    """Compute dq, dk, dv and, if wanted, dbias; `lse` of the results is its bits."""
    values = jax_compat.vary_alike([*operands.given, *results])
    return found_attention_backward_p.bind(*values, spec=spec, bias_grad=bias_grad)


def forward(*operands: Any, spec: AttentionSpec) -> list[Any]:
    """Compute what `found_attention_p` stands for."""
    out, lse = attention_forward(*Operands(*operands), spec)
    return [out, lax.bitcast_convert_type(lse.astype(jnp.float32), jnp.uint32)]


def backward(*operands: Any, spec: AttentionSpec, bias_grad: bool) -> list[Any]:
    """Compute what `found_attention_backward_p` stands for."""
    *known, bits, dout = operands
    lse = lax.bitcast_convert_type(bits, jnp.float32)
    operands = tuple(jax_compat.vary_alike([*known, lse, dout]))
    return list(attention_backward_p.bind(*operands, spec=spec, bias_grad=bias_grad))


def _define(primitive: Primitive, form: Callable[..., list[Any]], with_bias: int) -> None:
    """Define a primitive that has so many operands, if the fourth of them is a bias."""

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        return jvp_along(functools.partial(form, **params), primals, tangents)

    def batched(values: Sequence[Any], axes: Sequence[Any], **params: Any) -> Any:
        results = jax.vmap(functools.partial(form, **params), in_axes=tuple(axes))(*values)
        return results, [0] * len(results)

    primitive.multiple_results = True
    kind, trait = OpKind.COMPUTE, Trait.CONTRACTION
    bias = ((with_bias, 3),)
    define(primitive, form, typed_as(form), batched, jvp, kind=kind, trait=trait, addends=bias)


_define(found_attention_p, forward, 4)
_define(found_attention_backward_p, backward, 7)
