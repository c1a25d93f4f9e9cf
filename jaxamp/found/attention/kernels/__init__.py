"""Softmax attention as primitives of jaxamp, lowered to the fused kernel that a platform has."""

from jaxamp.found.attention.kernels.primitives import attention as attention
from jaxamp.found.attention.kernels.primitives import attention_forward as attention_forward
from jaxamp.found.attention.kernels.refusal import refusal as refusal
from jaxamp.found.attention.kernels.spec import AttentionSpec as AttentionSpec
