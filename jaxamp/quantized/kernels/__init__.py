"""Kernels for values in blocks that pay where XLA has none, as JAX primitives."""

from jaxamp.quantized.kernels.block_quantize import block_quantize as block_quantize
from jaxamp.quantized.kernels.block_scaled_matmul import block_scaled_matmul as block_scaled_matmul
from jaxamp.quantized.kernels.norm_quantize import norm_quantize as norm_quantize
from jaxamp.quantized.kernels.primitive import KernelFallbackWarning as KernelFallbackWarning
