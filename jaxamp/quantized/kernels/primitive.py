"""A kernel as a JAX primitive: one equation in the program, a lowering for each platform."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Primitive

from jaxamp.core import jax_compat
from jaxamp.core.define import compiled, define
from jaxamp.errors import KernelError
from jaxamp.kernels.config import KernelConfig, resolve
from jaxamp.kernels.gpu_lowering import target_gpu
from jaxamp.quantized.kernels.tile_checks import memory_obstacle

Form = Callable[..., Sequence[Any]]
_PLATFORMS = {"tpu": "tpu", "cuda": "gpu"}  # JAX's word for a platform and ours


class KernelFallbackWarning(UserWarning):
    """A kernel runs as XLA's reference on a platform for which there is a Pallas kernel."""


@dataclass(eq=False)
class KernelPrimitive:
    """A primitive of one kernel; call it as a function of operands and parameters.

    Every form takes the operands and the primitive's parameters.

    Attributes:
      name: name of the public function.
      reference: the same function in XLA operations.
      pallas: the Pallas kernel for a platform, which comes first; also takes ``config`` and
        ``interpret``.
      check: raises ``KernelError`` for a configuration that no operands could have on a platform;
        gets both, and the parameters.
      memory: how many bytes next to the arithmetic units it takes; gets both first.
      obstacle: why a platform's kernel cannot take these operands; ``None`` if it can.
      batch: the batching rule, which gets the primitive first.
    """

    name: str
    reference: Form
    pallas: Form
    check: Callable[..., None]
    memory: Callable[..., int]
    obstacle: Callable[..., str | None]
    batch: Callable[..., Any]

    def __post_init__(self) -> None:
        self.primitive = Primitive(f"jaxamp_{self.name}")
        self.primitive.multiple_results = True
        lowered = {p or None: functools.partial(self._on, p) for p in ("", *_PLATFORMS)}
        batch = functools.partial(self.batch, self)
        define(self.primitive, compiled(self.primitive), self._type, batch, self._jvp, lowered)

    def __call__(
        self, *operands: Any, config: KernelConfig | None = None, **params: Any
    ) -> list[Any]:
        """Check the configuration and record, run or interpret the kernel."""
        chosen = resolve(config, self.name)
        avals = [jax.typeof(x) for x in operands]
        for platform in _PLATFORMS.values():
            if getattr(chosen, platform) is not None:
                self._require_fit(platform, chosen, avals, params)
        if chosen.backend == "interpret":
            return self._interpret(*operands, config=chosen, **params)
        return self.primitive.bind(*operands, config=chosen, **params)

    def _interpret(self, *operands: Any, config: KernelConfig, **params: Any) -> list[Any]:
        platform = "gpu" if jax_compat.is_gpu_interpreter(config.interpret) else "tpu"
        self._refuse(self.obstacle(platform, *operands, **params), "interpret")
        self._require_fit(platform, config, operands, params)
        mode = True if config.interpret is None else config.interpret
        return list(self.pallas(platform, *operands, config=config, interpret=mode, **params))

    def _type(self, *avals: Any, config: KernelConfig, **params: Any) -> Any:
        return jax_compat.result_avals(functools.partial(self.reference, **params), avals)

    def _jvp(self, primals: Any, tangents: Any, **params: Any) -> Any:
        raise KernelError(
            f"{self.name} has no derivative: rounding is flat almost everywhere. Use it "
            "inside a jax.custom_vjp that says what the gradient shall be, or let amp quantize: "
            "its recipes treat rounding as the identity."
        )

    def _on(self, platform: str, *operands: Any, **params: Any) -> Sequence[Any]:
        return self._choose(platform, operands, **params)(*operands)

    def _choose(self, platform: str, avals: Any, *, config: KernelConfig, **params: Any) -> Form:
        """Return the form that is lowered on a platform."""
        reference = functools.partial(self.reference, **params)
        if config.backend == "reference":
            return reference
        reason = self._reason(platform, config, avals, params)
        if reason is None:
            form = functools.partial(self.pallas, _PLATFORMS[platform])
            return functools.partial(form, config=config, interpret=False, **params)
        if config.backend == "pallas":
            self._refuse(reason, "pallas")
        if platform:
            text = f"{self.name} runs as XLA's reference: {reason}."
            warnings.warn(text, KernelFallbackWarning, stacklevel=2)
        return reference

    def _reason(self, platform: str, config: KernelConfig, avals: Any, params: Any) -> str | None:
        """Return why a platform's kernel cannot run; raise if the configuration is to blame."""
        if not platform:
            return "there are Pallas kernels for TPU and CUDA only"
        if platform == "cuda" and (missing := _missing_on_cuda()):
            return missing
        ours = _PLATFORMS[platform]
        if (obstacle := self.obstacle(ours, *avals, **params)) is not None:
            return obstacle
        reason = self._misfit(ours, config, avals, params)
        if reason and (config.tile is not None or getattr(config, ours) is not None):
            raise KernelError(f"{self.name}: {reason}.")
        return reason

    def _misfit(
        self, platform: str, config: KernelConfig, operands: Any, params: Any
    ) -> str | None:
        """Return why operands do not fit a platform; raise if no operands could."""
        self.check(platform, config, **params)
        needed = self.memory(platform, config, *operands, **params)
        return memory_obstacle(platform, config, needed)

    def _require_fit(self, *call: Any) -> None:
        if reason := self._misfit(*call):
            raise KernelError(f"{self.name}: {reason}.")

    def _refuse(self, reason: str | None, backend: str) -> None:
        if reason is not None:
            raise KernelError(
                f"{self.name} with backend={backend!r}: {reason}. "
                "backend='auto' takes XLA's reference here."
            )


def _missing_on_cuda() -> str | None:
    """Return why no Mosaic GPU kernel runs on the GPU at hand; an absent GPU counts as Hopper."""
    gpu = target_gpu()
    if gpu is not None and gpu.capability != (9, 0):
        major, minor = gpu.capability
        return (
            "the kernels are written for Hopper, compute capability 9.0; "
            f"this GPU has {major}.{minor}"
        )
    if not jax_compat.has_module("absl"):
        return "Mosaic GPU needs absl-py, `pip install absl-py`"
    return None
