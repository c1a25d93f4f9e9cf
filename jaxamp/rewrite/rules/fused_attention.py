"""Emit attentions that were found in a program: as the kernels' primitives, on narrow operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxamp.kernels.attention import found
from jaxamp.rewrite.registry import RuleContext, rewrites


@rewrites("found_attention")
def forward(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Emit the forward pass."""
    return found.forward(*operands, **context.eqn.params)


@rewrites("found_attention_backward")
def backward(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Emit the backward pass."""
    return found.backward(*operands, **context.eqn.params)
