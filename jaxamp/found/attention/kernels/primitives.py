"""The primitives of attention: forward, its tangent, and the backward pass.

The first and the last stand for what was found in a program of float32, and are what it becomes:
whoever rewrites it gives them operands in the precision decided.

The tangent is an equation of its own, linear in the tangents of q, k, v and bias, whose transpose
is the backward primitive. So forward and reverse mode both work, and reverse mode finds the kernel
that a platform has; a ``custom_vjp`` would forbid forward mode. For tangents, and for derivatives
of derivatives, no platform has a kernel: the composed form is differentiated.

See: Dao 2023, arXiv:2307.08691, for the residuals: the output, and ``lse``, the logarithm of the
sum of exponentials of each row of scores, which has no derivative here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxamp.core import jax_compat
from jaxamp.core.define import compiled, define, jvp_along, typed_as
from jaxamp.core.taxonomy import OpKind, Trait
from jaxamp.found.attention.kernels import composed
from jaxamp.found.attention.kernels.fused import Form, form_of
from jaxamp.found.attention.kernels.partitioned import partitioned
from jaxamp.found.attention.kernels.platforms import PLATFORMS, chosen
from jaxamp.found.attention.kernels.spec import AttentionSpec, Operands, operands_of
from jaxamp.kernels.jax_compat.kernel_lowering import has_several_devices, lower_kernel

attention_forward_p = Primitive("attention_forward")
attention_backward_p = Primitive("attention_backward")
attention_tangent_p = Primitive("attention_tangent")


def forward(operands: Operands, spec: AttentionSpec) -> list[jax.Array]:
    """Compute softmax attention, ``softmax(scale · q kᵀ + bias) v``, in one equation.

    Query head n reads key head n // (N // K). The results are the output [*b, T, N, V] in the dtype
    of q, and the bits of `lse`, u32[*b, N, T].

    >>> x = jnp.ones((2, 3, 4, 8), jnp.bfloat16)
    >>> [array.shape for array in forward(Operands(x, x, x), AttentionSpec(scale=8**-0.5))]
    [(2, 3, 4, 8), (2, 4, 3)]
    """
    return _bind(attention_forward_p, operands.given, spec=spec)


def backward(operands: Operands, spec: AttentionSpec, bias_grad: bool) -> list[jax.Array]:
    """Compute dq, dk, dv and, if wanted, dbias; `lse` of the operands is its bits."""
    return _bind(attention_backward_p, operands.given, spec=spec, bias_grad=bias_grad)


def _bind(primitive: Primitive, operands: Sequence[Any], **params: Any) -> list[Any]:
    return primitive.bind(*jax_compat.vary_alike(operands), **params)


def _tangent(*operands: Any, given: tuple[bool, ...], **params: Any) -> tuple[Any, ...]:
    residuals, moving = _split_tangents(operands, given)
    known, moved = residuals[:-2], iter(moving)
    tangents = [
        next(moved) if is_given else jax_compat.symbolic_zero_like(x)
        for x, is_given in zip(known, given, strict=False)
    ]
    return jvp_along(functools.partial(composed.forward, **params), known, tangents)[1][:1]


def _split_tangents(values: Sequence[Any], given: tuple[bool, ...]) -> tuple[Any, Any]:
    """Split the operands of a tangent equation, or one value for each: residuals and tangents."""
    count = len(values) - sum(given)
    return values[:count], values[count:]


_FORMS: dict[Primitive, Form] = {
    attention_forward_p: composed.forward,
    attention_backward_p: composed.backward,
    attention_tangent_p: _tangent,
}
"""The composed form of each primitive, of its operands as they stand in the equation."""


# Derivatives.


def _is_zero(value: Any) -> bool:
    return isinstance(value, jax_compat.Zero)


def _jvp_of_forward(primals: Any, tangents: Any, *, spec: AttentionSpec) -> tuple[Any, Any]:
    results = _bind(attention_forward_p, primals, spec=spec)
    moving = [t for t in tangents if not _is_zero(t)]
    given = tuple(not _is_zero(t) for t in tangents) + (False,) * (4 - len(tangents))
    operands = [*primals, *results, *moving]
    moved = _bind(attention_tangent_p, operands, spec=spec, given=given)
    return results, [*moved, jax_compat.symbolic_zero_like(results[1])]


def _jvp_of_form(
    primitive: Primitive, primals: Any, tangents: Any, **params: Any
) -> tuple[Any, Any]:
    """Differentiate the composed form, which does not read the results of the forward pass."""
    form = functools.partial(_FORMS[primitive], **params, widen=True)
    return _bind(primitive, primals, **params), jvp_along(form, primals, tangents)[1]


def _transpose_of_tangent(
    cotangents: Any, *operands: Any, spec: AttentionSpec, given: tuple[bool, ...]
) -> list[Any]:
    (dout,) = cotangents
    residuals, moving = _split_tangents(operands, given)
    if _is_zero(dout):
        dout = jnp.zeros_like(residuals[-2])
    found = _bind(attention_backward_p, [*residuals, dout], spec=spec, bias_grad=given[3])
    wanted = [x for x, is_given in zip((*found, None)[:4], given, strict=True) if is_given]
    assert len(wanted) == len(moving)
    return [None] * len(residuals) + wanted


def _transpose_of_backward(
    cotangents: Any, *operands: Any, spec: AttentionSpec, bias_grad: bool
) -> list[Any]:
    """Transpose in the output's cotangent: to the tangent along the cotangents of dq, dk, dv."""
    residuals, dout = operands[:-1], operands[-1]
    assert ad.is_undefined_primal(dout), "the backward pass is linear in dout alone"
    given = tuple(not _is_zero(ct) for ct in cotangents) + (False,) * (4 - len(cotangents))
    along = [ct for ct in cotangents if not _is_zero(ct)]
    moved = _bind(attention_tangent_p, [*residuals, *along], spec=spec, given=given)
    return [None] * len(residuals) + moved


# Batching: into a new leading axis.


def _batch(primitive: Primitive, values: Any, axes: Any, **params: Any) -> tuple[Any, Any]:
    """Batch all operands, but for a bias of all examples; unless each has its own cotangent."""
    size = next(x.shape[d] for x, d in zip(values, axes, strict=True) if d is not None)
    given = params.get("given", ())
    beside = {attention_forward_p: 0, attention_backward_p: 3, attention_tangent_p: 2 + sum(given)}
    has_bias = len(values) - beside[primitive] == 4
    is_shared = has_bias and axes[3] is None and not (params.get("bias_grad") or any(given[3:]))
    operands = [
        batching.bdim_at_front(x, axis, 1 if is_shared and i == 3 else size)
        for i, (x, axis) in enumerate(zip(values, axes, strict=True))
    ]
    results = _bind(primitive, operands, **params)
    return results, [0] * len(results)


# What JAX asks of a primitive.


def _define(primitive: Primitive, jvp: Any = None, **words: Any) -> None:
    form = _FORMS[primitive]
    primitive.multiple_results = True
    # XLA's CPU backend computes products of 16-bit operands as products of float32.
    lowered = {None: form, "cpu": functools.partial(form, widen=True)}
    batch = functools.partial(_batch, primitive)
    jvp = jvp or functools.partial(_jvp_of_form, primitive)
    define(primitive, compiled(primitive), typed_as(form), batch, jvp, lowered, **words)
    jax_compat.check_nans(primitive, lambda params: primitive.name)


def _lower(platform: str, primitive: Primitive, context: Any, *operands: Any, **params: Any) -> Any:
    spec, bias_grad, avals = params["spec"], params.get("bias_grad"), context.avals_in
    types = operands_of(avals, backward=bias_grad is not None)
    kernel = chosen(platform, context, types, spec)
    is_split = has_several_devices(context)
    if kernel is not None:
        form = form_of(kernel, spec, bias_grad)
        if is_split:
            form = partitioned(form, avals, spec, bias_grad)
        return lower_kernel(form, context, *operands)
    composed_form = functools.partial(_FORMS[primitive], **params, along=not is_split)
    return mlir.lower_fun(composed_form, multiple_results=True)(context, *operands)


_OF_PRODUCTS: dict[str, Any] = {"kind": OpKind.COMPUTE, "trait": Trait.CONTRACTION}
_define(attention_forward_p, _jvp_of_forward, **_OF_PRODUCTS, addends=((4, 3),))
_define(attention_backward_p, **_OF_PRODUCTS, addends=((7, 3),))
_define(attention_tangent_p)
ad.primitive_transposes[attention_tangent_p] = _transpose_of_tangent
ad.primitive_transposes[attention_backward_p] = _transpose_of_backward
for _platform in PLATFORMS:
    for _primitive in (attention_forward_p, attention_backward_p):
        _rule = functools.partial(_lower, _platform, _primitive)
        mlir.register_lowering(_primitive, _rule, platform=_platform)
