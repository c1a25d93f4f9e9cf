"""Rewrite rules, one file per family; importing this package registers them."""

from jaxamp.rewrite.rules import (
    contraction,
    control_flow,
    custom_derivatives,
    elementwise,
    movement,
)

__all__ = ["contraction", "control_flow", "custom_derivatives", "elementwise", "movement"]
