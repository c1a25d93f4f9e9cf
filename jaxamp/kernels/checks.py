"""What can be said of a configuration before anything is lowered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxamp.errors import KernelError
from jaxamp.kernels.config import KernelConfig
from jaxamp.kernels.params import SERIAL, semantic_words

# Bytes of shared memory that one block may have on Hopper, and of VMEM that a kernel may use on a
# TPU if it asks for no more (v5e and v5p; later chips allow more).
SHARED_MEMORY = 232448
VMEM = 16 * 2**20

Axes = Mapping[str, bool]  # name of each axis of a grid: whether it may run in any order


def check_grid(kernel: str, config: KernelConfig, *, gpu: Axes, tpu: Axes, inputs: int) -> None:
    """Refuses dimension semantics that do not fit the grid, and fields without a meaning there.

    Args:
      kernel: its name.
      config: the configuration.
      gpu: axes of the grid of the GPU kernel.
      tpu: axes of the grid of the TPU kernel.
      inputs: how many arrays the TPU kernel reads.

    Raises:
      KernelError: what is wrong and what to write.
    """
    if config.gpu is not None:
        _check_semantics(kernel, "gpu", semantic_words(config.gpu), gpu)
    if config.tpu is None:
        return
    _check_semantics(kernel, "tpu", semantic_words(config.tpu), tpu)
    fusion = config.tpu.allow_input_fusion
    if fusion is not None and len(fusion) != inputs:
        raise KernelError(
            f"{kernel}: allow_input_fusion={fusion} has {len(fusion)} entries, and the kernel "
            f"reads {inputs} arrays."
        )
    _check_sparse_core(kernel, config.tpu)


def _check_sparse_core(kernel: str, params: Any) -> None:
    """Two fields speak about SparseCore kernels and would be ignored or fail late."""
    for name, idle in (("use_tc_tiling_on_sc", None), ("needs_layout_passes", True)):
        if (value := getattr(params, name, idle)) != idle:
            raise KernelError(
                f"{kernel}: {name}={value} is for kernels on the SparseCore; this one runs on "
                f"the TensorCore, where only {name}={idle} means anything. Leave it out."
            )


def _check_semantics(
    kernel: str, platform: str, given: tuple[str, ...] | None, axes: Axes
) -> None:
    if given is None:
        return
    names = ", ".join(axes)
    if len(given) != len(axes):
        raise KernelError(
            f"{kernel}: dimension_semantics={given} has {len(given)} entries; the grid on "
            f"{platform.upper()} has {len(axes)} axes: {names}."
        )
    for word, (name, free) in zip(given, axes.items(), strict=True):
        if word != SERIAL[platform] and not free:
            raise KernelError(
                f"{kernel}: the axis {name!r} of ({names}) cannot be {word!r}: its steps add up "
                f"in one accumulator, in order. Write {SERIAL[platform]!r} for it."
            )


def semantics_in_force(platform: str, config: KernelConfig, axes: Axes) -> tuple[str, ...]:
    """The words for each axis: those of the configuration, else parallel wherever possible."""
    params = config.gpu if platform == "gpu" else config.tpu
    given = params and semantic_words(params)
    return given or tuple("parallel" if free else SERIAL[platform] for free in axes.values())


def check_tile(kernel: str, config: KernelConfig, *units: tuple[str, int]) -> None:
    """Refuses a tile of the wrong rank, or whose sizes are no multiples of what they must be.

    Args:
      kernel: its name.
      config: the configuration.
      *units: name of each size, and what it is a multiple of.
    """
    if config.tile is None:
        return
    meaning = ", ".join(f"{name} (a multiple of {unit})" for name, unit in units)
    whole = all(size % unit == 0 for size, (_, unit) in zip(config.tile, units, strict=False))
    if len(config.tile) != len(units) or not whole:
        raise KernelError(f"{kernel}: tile={config.tile} should be ({meaning}).")


def check_memory(kernel: str, platform: str, config: KernelConfig, needed: int) -> None:
    """Refuses what cannot fit the memory next to the arithmetic units.

    Args:
      kernel: its name.
      platform: ``"gpu"`` or ``"tpu"``.
      config: the configuration.
      needed: bytes.
    """
    if platform == "gpu":
        limit, memory = SHARED_MEMORY, "shared memory"
        advice = "Take a smaller tile or a lower max_concurrent_steps"
    else:
        own = config.tpu and config.tpu.vmem_limit_bytes
        limit, memory = own or VMEM, "VMEM"
        advice = "Take a smaller tile or a higher vmem_limit_bytes"
    if needed > limit:
        raise KernelError(
            f"{kernel}: needs about {needed:,} bytes of {memory}, and there are {limit:,}. {advice}."
        )
