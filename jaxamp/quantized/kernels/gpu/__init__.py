"""The kernels in Mosaic GPU, for Hopper. All use of that unsteady interface is in this folder.

Values are held as the tensor core's accumulators are, ``Layout.WGMMA``: 64 rows over the 128
threads of a warpgroup, so that a reduction along a row stays within four threads.
"""

from jaxamp.quantized.kernels.gpu.hopper_block_quantize import block_quantize as block_quantize
from jaxamp.quantized.kernels.gpu.hopper_block_scaled_matmul import (
    block_scaled_matmul as block_scaled_matmul,
)
from jaxamp.quantized.kernels.gpu.hopper_norm_quantize import norm_quantize as norm_quantize
