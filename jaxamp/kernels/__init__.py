"""Configurations of kernels, and kernels of no feature."""

from jaxamp.kernels.config import KernelConfig as KernelConfig
from jaxamp.kernels.config import kernel_config as kernel_config
from jaxamp.kernels.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from jaxamp.kernels.params import gpu_params as gpu_params
from jaxamp.kernels.params import tpu_params as tpu_params
