"""Float32 programs that careless low precision ruins, one file a family, one registry: `CASES`."""

from tests.numerics.hostile import (
    counts,
    differences,
    epsilons,
    masks,
    positions,
    random_draws,
    ranges,
    sums,
    time_stepping,
    updates,
)
from tests.numerics.hostile.registry import CASES, Case, hostile

FAMILIES = (
    counts,
    differences,
    epsilons,
    masks,
    positions,
    random_draws,
    ranges,
    sums,
    time_stepping,
    updates,
)

__all__ = ["CASES", "FAMILIES", "Case", "hostile"]
