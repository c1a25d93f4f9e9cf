"""Checks of a kernel's configuration, made before anything is lowered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxamp.core.formats import CastConfig
from jaxamp.errors import KernelError
from jaxamp.kernels.config import KernelConfig
from jaxamp.kernels.params import SERIAL, semantic_words

# Bytes of shared memory that one block may have on Hopper, and of VMEM that a kernel may use on a
# TPU if it asks for no more (v5e and v5p; later chips allow more).
SHARED_MEMORY = 232448
VMEM = 16 * 2**20

Axes = Mapping[str, bool]  # name of each axis of a grid: whether it may run in any order


def block_of(cast: CastConfig) -> tuple[int, int]:
    """Return the rows and columns that share a factor."""
    assert cast.sf_block is not None  # the public functions have seen to it
    return cast.sf_block


def check_grid(kernel: str, platform: str, config: KernelConfig, axes: Axes, inputs: int) -> None:
    """Refuse dimension semantics that do not fit the grid, and fields without a meaning there.

    Args:
      kernel: its name.
      platform: ``"gpu"`` or ``"tpu"``.
      config: the configuration.
      axes: of the platform's grid.
      inputs: how many arrays the kernel reads.

    Raises:
      KernelError: what is wrong and what to write.
    """
    params = getattr(config, platform)
    if params is None:
        return
    _check_semantics(kernel, platform, semantic_words(params), axes)
    if platform == "gpu":
        return
    fusion = params.allow_input_fusion
    if fusion is not None and len(fusion) != inputs:
        raise KernelError(
            f"{kernel}: allow_input_fusion={fusion} has {len(fusion)} entries, and the kernel "
            f"reads {inputs} arrays."
        )
    _check_without_meaning(kernel, params)


# Fields that would be ignored by every kernel here, or fail late: the idle value, and what for.
_SPARSE = "kernels on the SparseCore, and this one runs on the TensorCore"
_WITHOUT_MEANING = {
    "use_tc_tiling_on_sc": (None, _SPARSE),
    "needs_layout_passes": (True, _SPARSE),
    "opt_level": (None, _SPARSE),
    "fuse_transposed_lhs_in_matmul": (
        False,
        "products with a transposed left operand, and here both are read along the contraction",
    ),
}


def _check_without_meaning(kernel: str, params: Any) -> None:
    for name, (idle, purpose) in _WITHOUT_MEANING.items():
        if (value := getattr(params, name, idle)) != idle:
            raise KernelError(f"{kernel}: {name}={value} is for {purpose}. Leave it out.")


def _check_semantics(kernel: str, platform: str, given: tuple[str, ...] | None, axes: Axes) -> None:
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
    """Return the words for each axis: the configuration's, else parallel wherever possible."""
    params = config.gpu if platform == "gpu" else config.tpu
    given = params and semantic_words(params)
    return given or tuple("parallel" if free else SERIAL[platform] for free in axes.values())


def check_tile(
    kernel: str, platform: str, config: KernelConfig, **units: tuple[int, int | None]
) -> None:
    """Refuse a tile of the wrong rank, or whose sizes are not what they must be.

    Args:
      kernel: its name.
      platform: ``"gpu"`` or ``"tpu"``.
      config: the configuration.
      **units: for each size what it is a multiple of, and the most that it may be.
    """
    if config.tile is None:
        return
    meaning = ", ".join(
        f"{name} (a multiple of {unit}{f', at most {most}' if most else ''})"
        for name, (unit, most) in units.items()
    )
    sizes = zip(config.tile, units.values(), strict=False)
    fits = all(size % unit == 0 and size <= (most or size) for size, (unit, most) in sizes)
    if len(config.tile) != len(units) or not fits:
        raise KernelError(
            f"{kernel} on {platform.upper()}: tile={config.tile} should be ({meaning})."
        )


def memory_obstacle(platform: str, config: KernelConfig, needed: int) -> str | None:
    """Return why bytes do not fit the memory next to the arithmetic units; ``None`` if they do.

    Args:
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
    if needed <= limit:
        return None
    return f"needs about {needed:,} bytes of {memory}, there are {limit:,}. {advice}"
