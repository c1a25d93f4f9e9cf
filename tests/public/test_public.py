"""Public programs train under `amp`, wherever it stands, as in float32."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from tests.public import equinox, haiku, linen, nnx, transformations
from tests.public.registry import PLACES, PUBLIC
from tests.tolerances import bound

LIBRARIES = (equinox, haiku, linen, nnx, transformations)
SHORT = ("vae", "nnx_lora", "accumulation_and_averages", "contrastive")
LUCK = 3.0
"""How much closer a library's own bfloat16 may be on four losses, where roundings may cancel."""


@functools.cache
def trained(name, place="", dtype=None):
    """The losses of a program, once for all tests."""
    return PUBLIC[name].losses(place, dtype)


def cases():
    """Each program with `amp` in each of its places; some of them short."""
    for name in PUBLIC:
        for place in PLACES:
            short = name in SHORT and SHORT.index(name) == PLACES.index(place)
            yield pytest.param(name, place, marks=[] if short else [pytest.mark.long])


@pytest.mark.parametrize(("name", "place"), list(cases()))
def test_trains_as_in_float32(name, place):
    """The losses of every step are those of float32 but for roundings, which there are."""
    reference, ours = trained(name), trained(name, place)
    assert np.unique(reference).size == reference.size  # it learns
    error = np.abs(ours - reference).max()
    assert (error > 0) == (place not in PUBLIC[name].kept)
    assert error <= bound("deep", 1, "bfloat16", reference, reference)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, found in PUBLIC.items() if found.has_dtype])
def test_is_no_further_from_float32_than_the_library_s_own_bf16(name):
    """Over all steps, by the places' median."""
    reference, own = trained(name), trained(name, dtype=jnp.bfloat16)
    errors = [np.abs(trained(name, at) - reference).mean() for at in PLACES]
    assert np.median(errors) <= LUCK * np.abs(own - reference).mean()


def test_there_are_twenty():
    """Of every library some."""
    assert len(PUBLIC) >= 20
    homes = {found.train.__module__ for found in PUBLIC.values()}
    assert homes == {library.__name__ for library in LIBRARIES}
