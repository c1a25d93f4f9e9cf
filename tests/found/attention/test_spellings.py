"""Attention is found in every spelling of the corpus, and near misses are left alone."""

import jax
import jax.numpy as jnp
import pytest

import jaxamp
from tests.found.attention import near_misses, of_packages, spellings  # noqa: F401
from tests.found.attention.corpus import NEAR_MISSES, SPELLINGS
from tests.found.attention.finding import FUSED, JOINT, ORDERS, found
from tests.found.attention.not_found import APART, NOT_FOUND


def test_there_are_enough_of_them():
    """At least sixty spellings, in functions written out alone; at least forty near misses."""
    assert sum(not program.packages for program in SPELLINGS.values()) >= 60
    assert len(NEAR_MISSES) >= 40


def test_the_list_names_spellings():
    """What is listed as not found exists, with a reason."""
    assert {name for name, _ in NOT_FOUND} <= SPELLINGS.keys()
    assert {order for _, order in NOT_FOUND} <= set(ORDERS)
    assert all(NOT_FOUND.values())


def _long_for_packages(names):
    """Their modules take seconds to import and to initialise."""
    return [
        pytest.param(name, marks=[pytest.mark.long] if SPELLINGS[name].packages else [])
        for name in names
    ]


@pytest.mark.product("name", every=2)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", _long_for_packages(SPELLINGS))
def test_a_spelling_is_found(name, order):
    """All attentions of a program; what is listed as not found is not, or the list is old."""
    program = SPELLINGS[name]
    if program.missing:
        pytest.skip(program.missing)
    result = found(program, order)
    if (name, order) in NOT_FOUND:
        assert result.count < program.count, "it is found: take it off the list"
        assert {*(result.refused or [APART])} & {*NOT_FOUND[name, order].split("; ")}, result
    else:
        assert result.count >= program.count, result.refused


def test_words_that_are_rows_and_columns_are_one_axis():
    """The cotangent of an output that leaves as an image is merged as queries and keys are."""
    program = SPELLINGS["pixels"]
    assert found(program, JOINT).count == program.count


def test_what_is_added_and_taken_away_again_is_nothing():
    """The cotangents of a maximum that is differentiated add up to zero."""
    program = SPELLINGS["by_hand_through_the_maximum"]
    assert found(program, JOINT).count == program.count


def test_the_transpose_of_a_softmax_over_queries_is_left_alone():
    """It is an attention, whose values are cotangents of what its own backward pass returns."""
    fn, (q, k, v) = NEAR_MISSES["softmax_over_queries"].built
    step = jax.grad(lambda q, k: jnp.square(fn(q, k, v)).sum(), (0, 1))
    assert not jaxamp.plan_of(step, FUSED)(q, k).found


@pytest.mark.product("name")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_is_left_alone(name, order):
    """No part of it is replaced."""
    assert not found(NEAR_MISSES[name], order).any
