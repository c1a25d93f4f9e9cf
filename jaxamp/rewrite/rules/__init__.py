"""Rewrite rules, one file per family; importing this package registers them."""

from jaxamp.rewrite.rules import (
    calls,
    collectives,
    contraction,
    control_flow,
    conversion,
    custom_derivatives,
    equality,
    fused_attention,
    logistic,
    movement,
    sums,
)
from jaxamp.rewrite.rules import scatter as typed_updates
from jaxamp.rewrite.rules import shard_map as manual

__all__ = [
    "calls",
    "collectives",
    "contraction",
    "control_flow",
    "conversion",
    "custom_derivatives",
    "equality",
    "fused_attention",
    "logistic",
    "manual",
    "movement",
    "sums",
    "typed_updates",
]
