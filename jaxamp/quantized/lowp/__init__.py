"""Low-precision numbers: arrays of 8 and 4 bits with their scale factors."""

from jaxamp.quantized.lowp.scaled_array import Blocks as Blocks
from jaxamp.quantized.lowp.scaled_array import ScaledArray as ScaledArray
from jaxamp.quantized.lowp.scaled_array import dequantize as dequantize
from jaxamp.quantized.lowp.scaled_array import quantize as quantize
