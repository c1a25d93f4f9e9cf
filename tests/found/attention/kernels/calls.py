"""Attention as a function of arrays."""

from typing import Any

from jaxamp.found.attention.kernels.primitives import forward
from jaxamp.found.attention.kernels.spec import AttentionSpec, Operands, of_bits


def attention(q: Any, k: Any, v: Any, bias: Any, spec: AttentionSpec) -> Any:
    return forward(Operands(q, k, v, bias), spec)[0]


def attention_forward(q: Any, k: Any, v: Any, bias: Any, spec: AttentionSpec) -> tuple[Any, Any]:
    """The output, and the logarithms of the sums of rows."""
    out, bits = forward(Operands(q, k, v, bias), spec)
    return out, of_bits(bits)
