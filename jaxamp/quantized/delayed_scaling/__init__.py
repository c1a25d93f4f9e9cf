"""Steps whose quantized products take their scales, and their parameters, from earlier steps."""

from jaxamp.quantized.delayed_scaling.delayed_function import DelayedFunction as DelayedFunction
