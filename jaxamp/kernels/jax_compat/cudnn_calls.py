"""JAX's own calls of cuDNN: checks, and attention's forward and backward primitive."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp.core.jax_compat.checkpoints import with_globals


def cudnn_version() -> int | None:
    """Return the version of the cuDNN that JAX has loaded; ``None`` where there is none."""
    from jax._src.cudnn import fused_attention_stablehlo as calls

    try:
        return calls.check_cudnn_version()
    except RuntimeError:
        return None


def cudnn_refusal(operands: Sequence[Any], training: bool, gpu: Any) -> str | None:
    """Return why JAX's checks refuse an attention in the layout BTNH; ``None`` if they accept it.

    The checks ask the GPU at hand; here they are told of one, a ``TargetGpu``.
    """
    from jax._src.cudnn import fused_attention_stablehlo as calls

    (q, k, v, bias), capability = operands, gpu.capability

    def parsed(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    answers = {
        "check_compute_capability": lambda least: capability >= parsed(least),
        "is_cuda_compute_capability_equal": lambda exact: capability == parsed(exact),
    }
    supported = with_globals(calls.check_is_flash_attention, answers)
    layout = calls.AttentionLayout.BTNH
    try:
        calls.check_layout(q, k, v, bias, None, None, None, None, None, None, layout)
        supported(q, k, v, layout.value, gpu.cudnn, bias is not None, training)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return None


def cudnn_forward(operands: Sequence[Any], spec: Any) -> tuple[Any, ...]:
    """Return the output in the layout BTNH, and the log-sum-exp of the scores as f32[B, N, T].

    Operands are q, k, v and a bias or ``None``; of the ``AttentionSpec`` no mask is read.
    """
    from jax._src.cudnn import fused_attention_stablehlo as calls

    params = _words(calls, operands, spec, False) | {"is_training": True}
    return tuple(calls._dot_product_attention_fwd_p.bind(*_filled(operands), **params))


def cudnn_backward(
    operands: Sequence[Any], results: Sequence[Any], spec: Any, bias_grad: bool
) -> tuple[Any, ...]:
    """Return the cotangents of q, k, v, and with `bias_grad` that of the bias."""
    from jax._src.cudnn import fused_attention_stablehlo as calls

    params, (out, lse, dout) = _words(calls, operands, spec, bias_grad), results
    known = (*_filled(operands), lse, out, dout)
    return tuple(calls._dot_product_attention_bwd_p.bind(*known, **params))


def _filled(operands: Sequence[Any]) -> tuple[Any, ...]:
    q, k, v, bias = operands
    unused = jnp.zeros(0, q.dtype)  # for lengths, offsets and page tables
    return (q, k, v, unused if bias is None else bias, *(unused,) * 6)


def _words(calls: Any, operands: Sequence[Any], spec: Any, bias_grad: bool) -> dict[str, Any]:
    taken = inspect.signature(calls._dot_product_attention_fwd_cuda_lowering).parameters
    return {
        "variadic_args": (operands[3] is not None, bias_grad),
        # JAX 0.12 takes a function of the scores besides.
        **{name: None for name in ("score_mod_name", "score_mod_jaxpr") if name in taken},
        "scale": spec.scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "mask_type": calls.MaskType.CAUSAL if spec.causal else calls.MaskType.NO_MASK,
        "layout": calls.AttentionLayout.BTNH.value,
        "sliding_window_length": spec.window,
    }


def cudnn_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Return the ``jax.export`` checks to disable: JAX guarantees no call of cuDNN."""
    from jax._src.cudnn import fused_attention_stablehlo as calls

    names = calls._custom_name_maps.values()
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]


def cudnn_lowest(dtype: Any) -> Any:
    """Return the finite number that JAX adds to masked scores for cuDNN, instead of -inf."""
    from jax._src.cudnn import fused_attention_stablehlo as calls

    return calls.get_large_negative_number(np.dtype(dtype))
