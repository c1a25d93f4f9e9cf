"""Kernels that pay where XLA has none, as JAX primitives, and how they are compiled."""

from jaxamp.kernels.block_quantize import block_quantize as block_quantize
from jaxamp.kernels.block_scaled_matmul import block_scaled_matmul as block_scaled_matmul
from jaxamp.kernels.config import KernelConfig as KernelConfig
from jaxamp.kernels.config import kernel_config as kernel_config
from jaxamp.kernels.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from jaxamp.kernels.norm_quantize import norm_quantize as norm_quantize
from jaxamp.kernels.params import gpu_params as gpu_params
from jaxamp.kernels.params import tpu_params as tpu_params
from jaxamp.kernels.primitive import KernelFallbackWarning as KernelFallbackWarning
