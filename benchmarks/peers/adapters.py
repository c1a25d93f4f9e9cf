"""What a user of each library writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

LOW = jnp.bfloat16


def f32(loss: Any) -> Any:
    return jax.value_and_grad(loss)


def ours(loss: Any) -> Any:
    import jaxamp

    return jax.value_and_grad(jaxamp.amp(loss))


def ours_around(loss: Any) -> Any:
    import jaxamp

    return jaxamp.amp(jax.value_and_grad(loss))


def ours_fp8(loss: Any) -> Any:
    import jaxamp

    policy = jaxamp.PrecisionPolicy.FP8_CURRENT.replace(scaling={"small": ()})
    return jax.value_and_grad(jaxamp.amp(loss, policy))


def jmp(loss: Any) -> Any:
    import jmp

    policy = jmp.get_policy("p=f32,c=bf16,o=f32")

    def cast(*args: Any) -> Any:
        return policy.cast_to_output(loss(*policy.cast_to_compute(args)))

    return jax.value_and_grad(cast)


def mpx(loss: Any) -> Any:
    import mpx  # pyright: ignore[reportMissingImports]

    mpx.set_half_precision_datatype(jnp.bfloat16)
    scaling = mpx.DynamicLossScaling(jnp.float32(1.0), jnp.float32(1.0))
    gradient = mpx.filter_value_and_grad(loss, scaling)

    def value_and_grad(*args: Any) -> Any:
        value, _, _, grads = gradient(*args)
        return value, grads

    return value_and_grad


def grampax(loss: Any) -> Any:
    import grampax  # pyright: ignore[reportMissingImports]

    return jax.value_and_grad(grampax.autocast(loss, LOW))


def jaxamp_of_2023(loss: Any) -> Any:
    import jaxamp

    theirs: Any = jaxamp.amp  # another package of that name
    return jax.value_and_grad(theirs(loss, compute_dtype=LOW))


def haliax_fp8(loss: Any) -> Any:
    from haliax import quantization

    config = quantization.QuantizationConfig(fp8=True, compute_dtype=LOW)

    def value_and_grad(model: Any, *args: Any) -> Any:
        quantized = quantization.quantize_linear_layers(model, config)
        value, grads = jax.value_and_grad(loss)(quantized, *args)
        return value, quantization.partition_for_grad_overwrite(grads)[1]

    return value_and_grad


def flax_dtype() -> dict[str, Any]:
    return {"dtype": LOW}


def flax_fp8() -> dict[str, Any]:
    import flax.linen as nn

    return {"dot_general_cls": nn.Fp8DirectDotGeneralOp, "dtype": LOW}


def qwix() -> dict[str, Any]:
    import qwix  # pyright: ignore[reportMissingImports]

    rule = qwix.QtRule(
        module_path=".*", weight_qtype=jnp.float8_e4m3fn, act_qtype=jnp.float8_e4m3fn,
        bwd_qtype=jnp.float8_e5m2,
    )  # fmt: skip
    provider = qwix.QtProvider([rule])
    return {"convert": lambda model: qwix.quantize_model(model, provider)}


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "f32": f32,
    "ours": ours,
    "ours_around": ours_around,
    "ours_fp8": ours_fp8,
    "jmp": jmp,
    "mpx": mpx,
    "grampax": grampax,
    "jaxamp_of_2023": jaxamp_of_2023,
    "haliax_fp8": haliax_fp8,
}  # given the loss
BUILT: dict[str, Callable[[], dict[str, Any]]] = {
    "flax_dtype": flax_dtype,
    "flax_fp8": flax_fp8,
    "qwix": qwix,
}  # options of the modules
