"""Float32 programs that careless low precision ruins, one file a family, one registry: `CASES`."""

from tests.numerics.hostile.registry import CASES, Case, hostile
from tests.programs.registry import enter_modules

enter_modules(__name__, __path__)

__all__ = ["CASES", "Case", "hostile"]
