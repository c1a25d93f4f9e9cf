"""Programs that are less accurate with fused attention than without, by more than the bound.

Each with its reason; what is accurate leaves this list.
"""

LESS_ACCURATE: dict[tuple[str, str, str], str] = {}
