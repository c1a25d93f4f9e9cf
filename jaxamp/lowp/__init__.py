"""Low-precision numbers: arrays of 8 and 4 bits with their scale factors."""

from jaxamp.lowp.block_layout import Blocks as Blocks
from jaxamp.lowp.quantize import quantize as quantize
from jaxamp.lowp.scaled_array import ScaledArray as ScaledArray
from jaxamp.lowp.scaled_array import dequantize as dequantize
