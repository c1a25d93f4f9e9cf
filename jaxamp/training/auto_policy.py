"""The policy ``"auto"``: what suits the device, and why."""

from __future__ import annotations

import dataclasses
import functools
import logging
import timeit
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxamp.core.formats import Precision
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.policy.presets import ALWAYS_F32 as _F32
from jaxamp.policy.presets import MIXED_BF16 as _BF16
from jaxamp.policy.presets import MIXED_F16 as _F16
from jaxamp.training.loss_scale import DynamicLossScale, LossScale, NoOpLossScale

_LOGGER = logging.getLogger("jaxamp")
_AMPERE = (8, 0)  # the first NVIDIA generation whose matrix units read bf16
_VOLTA = (7, 0)  # the first that has matrix units at all
_AMD_WITH_BF16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
_WORTHWHILE = 1.2  # a choice: a smaller measured gain may be noise, and casts eat it up
_ROWS, _INNER, _COLUMNS = 256, 1024, 1024  # large enough to be bound by arithmetic


@dataclasses.dataclass(frozen=True, slots=True)
class AutoChoice:
    """Policy that ``"auto"`` stands for on a device.

    Attributes:
      policy: the policy.
      device: what the device calls itself.
      reason: why this policy.
    """

    policy: PrecisionPolicy
    device: str
    reason: str

    @property
    def needs_loss_scale(self) -> bool:
        """Return whether gradients can underflow, so that training needs a loss scale.

        >>> AutoChoice(PrecisionPolicy.MIXED_F16, "Tesla V100", "").needs_loss_scale
        True
        """
        return Precision.F16 in self.policy.low

    def loss_scale(self) -> LossScale:
        """Return a loss scale for training under the policy: dynamic, or one that does nothing.

        >>> AutoChoice(PrecisionPolicy.MIXED_BF16, "TPU v4", "").loss_scale()
        NoOpLossScale()
        """
        return DynamicLossScale() if self.needs_loss_scale else NoOpLossScale()

    def __str__(self) -> str:
        return f"policy 'auto' is {self.policy} on {self.device}: {self.reason}"


def auto_policy(device: Any = None) -> AutoChoice:
    """Pick the policy that suits a device, and say why.

    TPUs and NVIDIA GPUs from compute capability 8.0 on get ``mixed_bf16``; older NVIDIA GPUs
    ``mixed_f16``, whose training needs a loss scale; AMD GPUs with bf16 matrix units
    ``mixed_bf16``. A CPU stays f32 unless a bf16 product, measured once in a process, is
    faster here. Unknown hardware stays f32.

    ``amp(f, "auto")`` asks this when it is made, which starts JAX's backend: in a run of several
    processes call ``jax.distributed.initialize`` before. The choice is logged once.

    Args:
      device: the ``jax.Device`` to compute on; left out, JAX's default device.

    Returns:
      The policy and the reason for it; ``loss_scale()`` gives the loss scale that it needs.

    >>> choice = auto_policy()
    >>> choice.policy in (PrecisionPolicy.ALWAYS_F32, PrecisionPolicy.MIXED_BF16)
    True
    """
    device = _default_device() if device is None else device
    policy, reason = _choose(device)
    return AutoChoice(policy, device.device_kind, reason)


def _choose(device: Any) -> tuple[PrecisionPolicy, str]:
    if device.platform == "tpu":
        return _BF16, "the matrix units of every TPU read bf16."
    if device.platform == "cpu":
        speedup = bf16_speedup_on_cpu()
        measured = f"a bf16 matrix product, casts included, takes {1 / speedup:.2f} of the time in"
        if speedup >= _WORTHWHILE:
            return _BF16, f"{measured} f32 here."
        return _F32, f"{measured} f32 here, and less than {1 / _WORTHWHILE:.2f} was asked for."
    if device.platform not in ("gpu", "cuda", "rocm"):
        unknown = f"nothing is known about the platform {device.platform!r}"
        return _F32, f"{unknown}; choose a policy by name."
    capability = str(getattr(device, "compute_capability", ""))
    if not capability.startswith("gfx"):
        return _choose_nvidia(capability)
    if capability.startswith(_AMD_WITH_BF16):
        return _BF16, f"{capability} has matrix units for bf16."
    return _F32, f"{capability} is not known to have matrix units for bf16."


def _choose_nvidia(capability: str) -> tuple[PrecisionPolicy, str]:
    try:
        generation = tuple(int(number) for number in capability.split("."))
    except ValueError:
        return _F32, f"its compute capability {capability!r} is not understood; choose by name."
    if generation >= _AMPERE:
        return _BF16, f"compute capability {capability} has matrix units for bf16."
    units = "matrix units for f16" if generation >= _VOLTA else "f16 storage"
    return _F16, (
        f"compute capability {capability} has {units} and none for bf16, which starts at 8.0. "
        "Gradients in f16 can underflow: train with a loss scale, auto_policy().loss_scale()."
    )


@functools.cache
def bf16_speedup_on_cpu() -> float:
    """Measure how much faster a product of f32 arrays gets on this CPU in bf16, casts included."""
    cpu = SingleDeviceSharding(jax.devices("cpu")[0])
    # numpy, and compiled ahead: asked for inside of a trace, nothing must become part of it.
    arrays = np.ones((_ROWS, _INNER), np.float32), np.ones((_INNER, _COLUMNS), np.float32)
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=cpu) for a in arrays]

    def seconds(dtype: Any) -> float:
        def product(x: Any, w: Any) -> Any:
            return jnp.matmul(x.astype(dtype), w.astype(dtype)).astype(jnp.float32)

        run = jax.jit(product).lower(*types).compile()
        return min(timeit.repeat(lambda: run(*arrays).block_until_ready(), number=1))

    return seconds(jnp.float32) / seconds(jnp.bfloat16)


def _default_device() -> Any:
    chosen: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return jax.local_devices()[0] if chosen is None else chosen


def resolve() -> PrecisionPolicy:
    """Return the policy that ``"auto"`` stands for here, and log the reason once."""
    choice = auto_policy()
    _say(str(choice))
    return choice.policy


@functools.cache
def _say(sentence: str) -> None:
    # At this level it is seen in a program that never set up logging; and once is enough.
    _LOGGER.warning("jaxamp: %s", sentence)
