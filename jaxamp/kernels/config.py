"""Compiler configuration of kernels, and which one is in force."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from jaxamp.errors import KernelError, accepted
from jaxamp.kernels import params

BACKENDS = ("auto", "pallas", "reference", "interpret")


@dataclasses.dataclass(frozen=True, slots=True)
class KernelConfig:
    """Compiler configuration of jaxamp's kernel: plain data, hashable.

    Attributes:
      gpu: ``pallas.mosaic_gpu.CompilerParams``, or a map of its fields; ``None`` for the kernel's.
      tpu: ``pallas.tpu.CompilerParams``, or a map of its fields; ``None`` for the kernel's.
      backend: ``"auto"`` takes the Pallas kernel where there is one and the reference elsewhere;
        ``"pallas"`` refuses where there is none; ``"reference"`` is what XLA makes of the
        definition; ``"interpret"`` runs the Pallas kernel step by step on any machine.
      tile: rows and columns of what one program works on.
      delay_release: on a GPU, for how many steps of a pipeline an input is kept after it was read.
      interpret: with ``backend="interpret"``, which machine is imitated: ``pltpu.InterpretParams``
        or Mosaic GPU's ``InterpretParams``; ``None`` for Pallas' own interpreter, which knows
        nothing of compiler parameters.

    Raises:
      KernelError: a word, a class or a number is not one of these.

    >>> KernelConfig(gpu={"max_concurrent_steps": 4}, delay_release=1).delay_release
    1
    >>> KernelConfig(delay_release=1)
    Traceback (most recent call last):
        ...
    jaxamp.errors.KernelError: delay_release=1 must be below max_concurrent_steps, which is 1...
    """

    gpu: Any = None
    tpu: Any = None
    backend: str = "auto"
    tile: tuple[int, ...] | None = None
    delay_release: int = 0
    interpret: Any = None

    def __post_init__(self) -> None:
        for platform in ("gpu", "tpu"):
            object.__setattr__(self, platform, _parsed(platform, getattr(self, platform)))
        if self.backend not in BACKENDS:
            raise KernelError(
                f"backend={self.backend!r} is not understood. {accepted(self.backend, BACKENDS)}"
            )
        if self.tile is not None:
            object.__setattr__(self, "tile", _sizes(self.tile))
        if self.interpret is not None and self.backend != "interpret":
            raise KernelError("interpret=... says how backend='interpret' runs; set that too.")
        self._check_delay()

    def _check_delay(self) -> None:
        steps = 1 if self.gpu is None else self.gpu.max_concurrent_steps
        if type(self.delay_release) is not int or self.delay_release < 0:
            raise KernelError(f"delay_release={self.delay_release!r} is not a number of steps.")
        if self.delay_release and self.delay_release >= steps:
            raise KernelError(
                f"delay_release={self.delay_release} must be below max_concurrent_steps, which is "
                f"{steps}: a buffer cannot be kept for longer than the pipeline is deep. Set "
                f"gpu=gpu_params(max_concurrent_steps={self.delay_release + 1})."
            )

    def replace(self, **changes: Any) -> KernelConfig:
        """Return a copy with some fields changed.

        >>> KernelConfig().replace(backend="reference").backend
        'reference'
        """
        return dataclasses.replace(self, **changes)


def _parsed(platform: str, given: Any) -> Any:
    if given is None:
        return None
    if isinstance(given, Mapping):
        return params.build(platform, given)
    return params.checked(platform, given)


def _sizes(tile: Any) -> tuple[int, ...]:
    sizes = tuple(tile) if isinstance(tile, (tuple, list)) else (tile,)
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise KernelError(f"tile={tile!r} is not a tuple of positive integers.")
    return sizes


# A user context is part of the key of jit's caches.
_in_force: Any = jax.make_user_context(None)


@contextmanager
def kernel_config(config: KernelConfig | None = None, **fields: Any) -> Iterator[KernelConfig]:
    """Set the configuration of the kernels in the block that are given none.

    Functions that were jitted outside are traced again inside, so the block always has its effect.

    Args:
      config: the configuration; left out, one made of ``fields``.
      **fields: fields of ``KernelConfig``.

    Raises:
      KernelError: both a configuration and fields are given.

    >>> with kernel_config(backend="reference"):
    ...     resolve(None).backend
    'reference'
    """
    if config is not None and fields:
        raise KernelError("Give a KernelConfig or its fields, not both: config.replace(...).")
    chosen = required(config) if config is not None else KernelConfig(**fields)
    with _in_force(chosen):
        yield chosen


def required(config: Any) -> KernelConfig:
    """Return the argument, if it is a configuration."""
    if isinstance(config, KernelConfig):
        return config
    raise KernelError(f"config=... takes a jaxamp.kernels.KernelConfig, not {config!r}.")


def resolve(config: KernelConfig | None) -> KernelConfig:
    """Return the configuration of a call: its own, the innermost in force, or defaults."""
    if config is not None:
        return required(config)
    return _in_force.value or KernelConfig()
