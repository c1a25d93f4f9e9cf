"""Programs that cross from one context of a mesh to another are right in all three formats."""

import warnings

import pytest

from tests.meshes import checks
from tests.meshes.registry import KINDS, MESH_PROGRAMS


@pytest.mark.product("case.program", every=3)
@pytest.mark.parametrize("case", checks.every_case(), ids=str)
def test_types_and_numbers(case):
    """In both orders: results lie where those of float32 do, and are as near as rounding allows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fp8 that scales no product of a typed sharding
        checks.check(case)


def test_there_are_enough_programs():
    """Of each type of axes."""
    assert len(MESH_PROGRAMS) >= 60
    assert {program.kind for program in MESH_PROGRAMS.values()} == set(KINDS)
