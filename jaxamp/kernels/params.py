"""The compiler parameters of Pallas, built from field names under every supported JAX.

The two classes change with almost every release of JAX. A name that was ever documented is either a
field of the installed class or refused with the name of what took its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax

from jaxamp.core import jax_compat
from jaxamp.errors import KernelError, accepted

# Documented at one time or another and no longer fields: of which class, and what to do instead.
MOVED = {
    "delay_release": (
        "gpu",
        "It is a property of a block's specification now: give it to "
        "KernelConfig(delay_release=...), or in a kernel of your own to plgpu.BlockSpec.",
    ),
    "kernel_type": (
        "tpu",
        "The kind of core comes from the mesh that a kernel runs on, "
        "pltpu.create_tensorcore_mesh or a SparseCore mesh, since JAX 0.10.1. "
        "The kernels of jaxamp run on the TensorCore.",
    ),
}
_TITLES = {"gpu": "pallas.mosaic_gpu.CompilerParams", "tpu": "pallas.tpu.CompilerParams"}


def mosaic_gpu() -> ModuleType:
    """Import ``jax.experimental.pallas.mosaic_gpu`` when it is first needed.

    Raises:
      KernelError: absl-py, which JAX does not declare, is not installed.
    """
    try:
        from jax.experimental.pallas import mosaic_gpu
    except ModuleNotFoundError as error:
        raise KernelError(
            f"Mosaic GPU needs the module {error.name!r}. Run `pip install absl-py`."
        ) from None
    return mosaic_gpu


def mosaic_tpu() -> ModuleType:
    """Import ``jax.experimental.pallas.tpu`` when it is first needed."""
    from jax.experimental.pallas import tpu

    return tpu


_MODULES = {"gpu": mosaic_gpu, "tpu": mosaic_tpu}


def gpu_params(**fields: Any) -> Any:
    """Build the compiler parameters of a Mosaic GPU kernel.

    Args:
      **fields: fields of ``jax.experimental.pallas.mosaic_gpu.CompilerParams``.
        ``lowering_semantics`` may be given as a word.

    Returns:
      A ``mosaic_gpu.CompilerParams``.

    Raises:
      KernelError: the installed JAX has no such field; the message names its successor. Or a value
        is not understood.

    >>> gpu_params(approx_math=True, lowering_semantics="warpgroup").approx_math
    True
    >>> gpu_params(delay_release=1)
    Traceback (most recent call last):
        ...
    jaxamp.errors.KernelError: ...give it to KernelConfig(delay_release=...)...
    """
    return build("gpu", fields)


def tpu_params(**fields: Any) -> Any:
    """Build the compiler parameters of a Mosaic TPU kernel.

    Args:
      **fields: fields of ``jax.experimental.pallas.tpu.CompilerParams``.

    Returns:
      A ``tpu.CompilerParams``.

    Raises:
      KernelError: the installed JAX has no such field; the message names its successor. Or a value
        is not understood.

    >>> tpu_params(dimension_semantics=["parallel", "arbitrary"]).dimension_semantics
    ('parallel', 'arbitrary')
    """
    return build("tpu", fields)


def build(platform: str, fields: Mapping[str, Any]) -> Any:
    """Build the compiler parameters of a platform, ``"gpu"`` or ``"tpu"``, from its fields."""
    cls = params_class(platform)
    known = [field.name for field in dataclasses.fields(cls)]
    for name in fields:
        if name not in known:
            raise KernelError(_no_field(platform, name, known))
    try:
        params = cls(**{name: _value(platform, name, value) for name, value in fields.items()})
    except (TypeError, ValueError) as error:
        raise KernelError(f"{_TITLES[platform]}: {error}") from None
    return checked(platform, params)


def params_class(platform: str) -> type:
    """Return the class of compiler parameters of a platform."""
    return _MODULES[platform]().CompilerParams


def _no_field(platform: str, name: str, known: list[str]) -> str:
    text = f"{_TITLES[platform]} of JAX {jax.__version__} has no field {name!r}. "
    if name in MOVED:
        before, instead = MOVED[name]
        return f"{text}It was one of {_TITLES[before]}. {instead}"
    if elsewhere := [other for other in _MODULES if other != platform and name in _names(other)]:
        return f"{text}It is one of {_TITLES[elsewhere[0]]}."
    return text + accepted(name, known)


def _names(platform: str) -> list[str]:
    if platform == "gpu" and not jax_compat.has_module("absl"):
        return []
    return [field.name for field in dataclasses.fields(params_class(platform))]


def _value(platform: str, name: str, value: Any) -> Any:
    """Return a field's value; enums may be given by name."""
    choices: Any = getattr(_MODULES[platform](), _ENUMS.get(name, ""), None)
    if isinstance(value, str) and choices:
        by_name = {member.name.lower(): member for member in choices}
        if value.lower() not in by_name:
            raise KernelError(f"{name}={value!r} is not understood. {accepted(value, by_name)}")
        return by_name[value.lower()]
    return tuple(value) if isinstance(value, list) else value


_ENUMS = {
    "lowering_semantics": "LoweringSemantics",
    "profile_trace_scope": "TraceScope",
    "has_side_effects": "SideEffectType",
}


# What an axis of a grid may be called.
SEMANTICS = {
    "gpu": ("parallel", "sequential"),
    "tpu": ("parallel", "arbitrary", "core_parallel", "subcore_parallel"),
}
SERIAL = {"gpu": "sequential", "tpu": "arbitrary"}


def semantic_words(params: Any) -> tuple[str, ...] | None:
    """Return the dimension semantics in words, whether given as such or as members of an enum."""
    given = params.dimension_semantics
    return given and tuple(str(getattr(axis, "value", axis)).lower() for axis in given)


def checked(platform: str, params: Any) -> Any:
    """Return the parameters, after what can be said of them without a kernel.

    Raises:
      KernelError: another class, or a value that no kernel could use.
    """
    cls = params_class(platform)
    if not isinstance(params, cls):
        raise KernelError(
            f"KernelConfig({platform}=...) takes {_TITLES[platform]}, not "
            f"{type(params).__module__}.{type(params).__qualname__}. "
            f"Build it with jaxamp.kernels.{platform}_params(...)."
        )
    for word in semantic_words(params) or ():
        if word not in SEMANTICS[platform]:
            raise KernelError(
                f"dimension_semantics={params.dimension_semantics}: {word!r} is not a word of "
                f"{_TITLES[platform]}. {accepted(word, SEMANTICS[platform])} "
                f"An axis that must run in order is {SERIAL[platform]!r} there."
            )
    if platform == "gpu" and params.max_concurrent_steps < 1:
        raise KernelError(f"max_concurrent_steps={params.max_concurrent_steps} is below 1.")
    if platform == "tpu":
        _check_tpu(params)
    return params


def _check_tpu(params: Any) -> None:
    if params.vmem_limit_bytes is not None and params.vmem_limit_bytes <= 0:
        raise KernelError(f"vmem_limit_bytes={params.vmem_limit_bytes} is not positive.")
    lonely = params.collective_id is not None
    if lonely and not params.allow_collective_id_without_custom_barrier:
        raise KernelError(
            f"collective_id={params.collective_id} names the barrier of a kernel that talks to "
            "other chips, and the kernels of jaxamp do not. To set it all the same, add "
            "allow_collective_id_without_custom_barrier=True."
        )
