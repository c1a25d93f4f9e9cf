"""Random spellings agree with float64, in both orders, as kernels round."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.found.attention.recipes import check, check_meaning, recipes
from tests.selection import drawn

_settings = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@settings(max_examples=3, database=None, **_settings)
@given(recipes())
def test_recipes_are_attention(recipe):
    """Their float32 programs are what the oracle computes, gradients included."""
    check_meaning(recipe)


@settings(max_examples=2, database=None, **_settings)
@given(recipes())
def test_few_random_spellings(recipe):
    """A few, while one works."""
    check(recipe)


@pytest.mark.long
@settings(max_examples=drawn(200), database=None, **_settings)
@given(recipes())
def test_random_spellings(recipe):
    """More of them; `python -m tests.found.attention --random 2000` runs any number."""
    check(recipe)
