"""Check that a configuration and an array fit the kernel, before anything is lowered."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxamp.core.formats import CastConfig
from jaxamp.errors import KernelError
from jaxamp.kernels.config import KernelConfig
from jaxamp.kernels.params import semantic_words

NAME = "block_quantize"
AXES = ("batch", "rows", "columns")  # of the grids, in any order
# Blocks for which there are kernels; of others XLA makes what it can.
_BLOCKS = ((1, 32), (1, 64), (1, 128), (128, 128))
# On a GPU the smallest that holds whole blocks; on a TPU a choice, timed on none.
_TILES = {"gpu": (128, 128), "tpu": (256, 512)}
_UNIT = 128
# Bytes of shared memory that one program may have on Hopper, and of VMEM that a kernel may use on a
# TPU if it asks for no more (v5e and v5p; later chips allow more).
SHARED_MEMORY = 232448
VMEM = 16 * 2**20
# Fields that the kernel would ignore, or that fail late: the idle value, and what they are for.
_SPARSE = "kernels on the SparseCore, and this one runs on the TensorCore"
_WITHOUT_MEANING = {
    "use_tc_tiling_on_sc": (None, _SPARSE),
    "needs_layout_passes": (True, _SPARSE),
    "opt_level": (None, _SPARSE),
    "fuse_transposed_lhs_in_matmul": (False, "products, and this kernel has none"),
    "approx_math": (False, "exponentials, roots and the like, and this kernel has none"),
}


def block_of(cast: CastConfig) -> tuple[int, int]:
    """Return the rows and columns that share a factor."""
    assert cast.sf_block is not None  # the public function has seen to it
    return cast.sf_block


def tile_of(platform: str, config: KernelConfig, rows: int, cols: int) -> tuple[int, int]:
    """Return the rows and columns that one program quantizes."""
    tm, tn = config.tile or _TILES[platform]
    return min(tm, -(-rows // _UNIT) * _UNIT), min(tn, -(-cols // _UNIT) * _UNIT)


def semantics_in_force(platform: str, config: KernelConfig) -> tuple[str, ...]:
    """Return the words for each axis: the configuration's, or else parallel."""
    params = getattr(config, platform)
    return (params and semantic_words(params)) or ("parallel",) * len(AXES)


def obstacle(platform: str, x: Any, *, cast: CastConfig, transposed: bool) -> str | None:
    """Return why a platform's kernel cannot take an array; ``None`` if it can."""
    if cast.sf_block not in _BLOCKS:
        words = ", ".join(f"{r} x {c}" for r, c in _BLOCKS)
        return f"there are kernels for blocks of {words}, not {cast.sf_block}"
    if x.dtype == np.float64 or (platform == "tpu" and x.dtype == np.float16):
        return f"Mosaic {platform.upper()} takes no {x.dtype}"
    if platform == "gpu" and transposed and cast.sf_block[1] < 64:
        return "the transposed copy needs blocks of at least 64"
    return None


def misfit(
    platform: str, config: KernelConfig, x: Any, *, cast: CastConfig, transposed: bool
) -> str | None:
    """Return why an array does not fit the memory next to the arithmetic units.

    Raises:
      KernelError: no array would fit; what is wrong and what to write.
    """
    _check(platform, config, transposed)
    needed = _memory(platform, config, x, transposed)
    if platform == "gpu":
        limit, memory = SHARED_MEMORY, "shared memory"
        advice = "Take a smaller tile or a lower max_concurrent_steps"
    else:
        limit, memory = (config.tpu and config.tpu.vmem_limit_bytes) or VMEM, "VMEM"
        advice = "Take a smaller tile or a higher vmem_limit_bytes"
    if needed <= limit:
        return None
    return f"needs about {needed:,} bytes of {memory}, there are {limit:,}. {advice}"


def _check(platform: str, config: KernelConfig, transposed: bool) -> None:
    tile, params = config.tile, getattr(config, platform)
    if tile is not None and (len(tile) != 2 or any(size % _UNIT for size in tile)):
        raise KernelError(
            f"{NAME}: tile={tile} should be (rows, columns), each a multiple of {_UNIT}."
        )
    if params is None:
        return
    words = semantic_words(params)
    if words is not None and len(words) != len(AXES):
        raise KernelError(
            f"{NAME}: dimension_semantics={words} has {len(words)} entries; the grid on "
            f"{platform.upper()} has {len(AXES)} axes: {', '.join(AXES)}."
        )
    for name, (idle, purpose) in _WITHOUT_MEANING.items():
        if (value := getattr(params, name, idle)) != idle:
            raise KernelError(f"{NAME}: {name}={value} is for {purpose}. Leave it out.")
    fusion = getattr(params, "allow_input_fusion", None)
    if fusion is not None and len(fusion) != 1:
        raise KernelError(
            f"{NAME}: allow_input_fusion={fusion} has {len(fusion)} entries, and the kernel "
            "reads one array."
        )
    if platform == "gpu" and transposed and params.lowering_semantics.name != "Lane":
        raise KernelError(
            f"{NAME}: the transposed copy takes a register layout that Mosaic GPU infers with "
            "lowering_semantics='lane' only; write gpu_params(lowering_semantics='lane', ...)."
        )


def _memory(platform: str, config: KernelConfig, x: Any, transposed: bool) -> int:
    """Return the bytes that one program takes next to the arithmetic units."""
    tm, tn = tile_of(platform, config, *x.shape[1:])
    read = _steps_in_flight(platform, config, x, (tm, tn)) * tm * tn * x.dtype.itemsize
    # Values, and factors of blocks of 32 at most; on a TPU twice, for the copy under way.
    written = tm * tn * 5 // 4 * (2 if transposed else 1) * (1 if platform == "gpu" else 2)
    return read + written


def _steps_in_flight(platform: str, config: KernelConfig, x: Any, tile: tuple[int, int]) -> int:
    """Return how many tiles of the input are held at once."""
    if platform == "tpu":
        return 2
    words = semantics_in_force("gpu", config)
    sizes = x.shape[0], -(-x.shape[1] // tile[0]), -(-x.shape[2] // tile[1])
    steps = math.prod(n for n, word in zip(sizes, words, strict=True) if word != "parallel")
    return min(steps, 1 if config.gpu is None else config.gpu.max_concurrent_steps)
