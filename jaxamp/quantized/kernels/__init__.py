"""The kernel that quantizes in blocks, and which kernels of libraries multiply these."""

from jaxamp.quantized.kernels.block_quantize import KernelFallbackWarning as KernelFallbackWarning
from jaxamp.quantized.kernels.block_quantize import block_quantize as block_quantize
