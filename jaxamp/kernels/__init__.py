"""Configurations of kernels."""

from jaxamp.kernels.config import KernelConfig as KernelConfig
from jaxamp.kernels.config import kernel_config as kernel_config
from jaxamp.kernels.params import gpu_params as gpu_params
from jaxamp.kernels.params import tpu_params as tpu_params
