"""Quantization block by block in numpy and ml_dtypes, sharing nothing with jaxamp."""

import math

import ml_dtypes
import numpy as np

from tests import flags

E4M3, E5M2, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn
LARGEST = {E4M3: 448.0, E5M2: 57344.0, E2M1: 6.0}
LEAST = {E4M3: 2.0**-116, E5M2: 2.0**-109, E2M1: 2.0**-124}  # no scale is smaller

ROUNDED_ONCE = {"xla_cpu_use_fusion_emitters": True} if flags.HAS_OLDER_EMITTERS else {}
"""Options of a compiler that is held to bits of E2M1: XLA's older emitters for the CPU, which
`make test` compiles with, round to it by way of float16 (jaxlib 0.10.2)."""


def scale_of(amax, dtype, power_of_two):
    """The float32 scale of a block whose largest magnitude is `amax`."""
    if not np.isfinite(amax):
        return np.float32(np.nan)
    scale = np.float32(amax) * np.float32(1 / LARGEST[dtype])
    scale = max(scale, np.float32(LEAST[dtype]))
    if power_of_two:
        mantissa, exponent = math.frexp(scale)
        scale = np.float32(math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent))
    return np.float32(scale)


def encode(block, scale, dtype):
    """A block's values with a scale that is known."""
    if np.isnan(scale):
        return np.zeros(block.shape, dtype)
    inverse = np.float32(0) if scale == 0 else np.float32(1) / scale
    with np.errstate(under="ignore"):
        scaled = block.astype(np.float32) * inverse
    return np.clip(scaled, -LARGEST[dtype], LARGEST[dtype]).astype(dtype)


def quantize(x, dtype, block, power_of_two):
    """Values and float32 scales of an array of one or two axes; NVFP4's are rounded to e4m3."""
    matrix = np.atleast_2d(x)
    rows, cols = matrix.shape if block is None else block
    slices = [
        [np.s_[i : i + rows, j : j + cols] for j in range(0, matrix.shape[1], cols)]
        for i in range(0, matrix.shape[0], rows)
    ]
    with np.errstate(invalid="ignore"):
        scales = np.array(
            [
                [
                    scale_of(np.abs(matrix[s].astype(np.float32)).max(), dtype, power_of_two)
                    for s in r
                ]
                for r in slices
            ]
        )
    if dtype is E2M1 and block is not None and not power_of_two:
        scales = dequantize(*quantize(scales, E4M3, None, False), None)
    values = np.zeros(matrix.shape, dtype)
    for row, scale_row in zip(slices, scales, strict=True):
        for where, scale in zip(row, scale_row, strict=True):
            values[where] = encode(matrix[where], scale, dtype)
    return values.reshape(x.shape), scales


def dequantize(values, scales, block):
    """float32 values of an array of one or two axes."""
    matrix = np.atleast_2d(values.astype(np.float32))
    rows, cols = matrix.shape if block is None else block
    i, j = np.indices(matrix.shape)
    with np.errstate(over="ignore", under="ignore"):
        return (matrix * scales[i // rows, j // cols]).reshape(values.shape)
