"""Small float32 JAX programs, one file a family, one registry: `PROGRAMS`."""

from tests.programs import (
    attention,
    contractions,
    control_flow,
    convolutions,
    custom_rules,
    effects,
    indexing,
    kernels,
    losses,
    nested,
    norms,
    numerics,
    parallel,
    recurrent,
    solvers,
    training,
)
from tests.programs.registry import PROGRAMS, Draw, Program, program

FAMILIES = (
    attention,
    contractions,
    control_flow,
    convolutions,
    custom_rules,
    effects,
    indexing,
    kernels,
    losses,
    nested,
    norms,
    numerics,
    parallel,
    recurrent,
    solvers,
    training,
)

__all__ = ["FAMILIES", "PROGRAMS", "Draw", "Program", "program"]
