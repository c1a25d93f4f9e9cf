"""Errors of the user's code show the user's lines, wherever in the program they arise."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxamp
from jaxamp import amp

OURS = str(Path(jaxamp.__file__).parent)


def mistake(x: Any) -> Any:
    """A line with an error of the user's own."""
    raise ValueError("mine")


def shapes(x: Any) -> Any:
    """A line that JAX refuses."""
    return x @ jnp.ones((5, 5))


@jax.custom_vjp
def with_rule(x: Any) -> Any:
    """A function whose backward rule is wrong."""
    return x


with_rule.defvjp(lambda x: (x, x), lambda x, g: (mistake(x),))

PLACES: dict[str, Callable[..., Any]] = {
    "directly": lambda bad: lambda x: bad(x),
    "in jit": lambda bad: lambda x: jax.jit(bad)(x),
    "in scan": lambda bad: lambda x: jax.lax.scan(lambda c, _: (bad(c), None), x, None, 2)[0],
    "in cond": lambda bad: lambda x: jax.lax.cond(True, bad, lambda x: x, x),
    "in vmap": lambda bad: lambda x: jax.vmap(bad)(x[None]),
    "in remat": lambda bad: lambda x: jax.checkpoint(bad)(x),
}
AROUND: dict[str, Callable[..., Any]] = {
    "amp": amp,
    "grad of amp": lambda f: jax.grad(lambda x: amp(f)(x).sum()),
    "amp of grad": lambda f: amp(jax.grad(lambda x: f(x).sum())),
    "jit of amp": lambda f: jax.jit(amp(f)),
    "amp of amp": lambda f: amp(amp(f, "auto_mixed")),
}


def _check(call: Callable[[], Any], culprit: str) -> None:
    """`call` fails with a traceback that ends at the culprit and has no line of jaxamp's."""
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert not [frame for frame in frames if frame.filename.startswith(OURS)]
    last = [frame for frame in frames if "/jax/" not in frame.filename][-1]
    assert (last.filename, last.name) == (__file__, culprit)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("place", PLACES)
def test_the_users_line_ends_the_traceback(place: str, around: str) -> None:
    """An exception of the user's and one that JAX raises at the user's line."""
    for bad in (mistake, shapes):
        _check(lambda bad=bad: AROUND[around](PLACES[place](bad))(jnp.ones((3, 3))), bad.__name__)


@pytest.mark.parametrize("order", ["grad of amp", "amp of grad"])
def test_in_a_backward_rule(order: str) -> None:
    """A rule that is traced only when something is differentiated."""
    _check(lambda: AROUND[order](lambda x: with_rule(x @ x))(jnp.ones((3, 3))), "mistake")
