"""Small float32 JAX programs, one file a family, one registry: `PROGRAMS`."""

from tests.programs.registry import PROGRAMS, Draw, Program, enter_modules, program

enter_modules(__name__, __path__)

__all__ = ["PROGRAMS", "Draw", "Program", "program"]
