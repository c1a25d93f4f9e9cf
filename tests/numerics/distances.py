"""How far islands under jaxamp are from float32 inside, rounded once: in low numbers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp import amp
from tests.numerics.islands import INPUTS, ISLANDS, Island
from tests.numerics.ulps import LOW, POLICIES, distance

QUANTITIES = ("value", "grad(amp)", "amp(grad)")
NEIGHBOUR = 1.0
"""The distance that is allowed."""
_BY = (0, 1)  # the input and the parameters


@dataclasses.dataclass(frozen=True)
class Point:
    """An input of an island that is exact in a low format, with the float32 results for it."""

    x: np.ndarray
    cotangent: np.ndarray
    value: np.ndarray
    gradient: Any


def island_distance(name: str, low: str, quantity: str) -> float:
    """How many low numbers a quantity is off at most, over all `INPUTS`.

    Args:
        name: of the island.
        low: a key of `LOW`.
        quantity: one of `QUANTITIES`; gradients are by the input and the parameters.
    """
    island = ISLANDS[name]
    fn = _compiled(_quantity(island, POLICIES[low], quantity))
    return max(_distance(island, fn, _point(name, low, where), low, quantity) for where in INPUTS)


def _quantity(island: Island, policy: str, quantity: str) -> Any:
    def program(*args: Any) -> Any:  # of its own: the islands are no layers of one model
        return island.program(*args)

    if quantity == "value":
        return amp(lambda x, params, cotangent, *rest: program(x, params, *rest), policy)
    if quantity == "grad(amp)":
        return jax.grad(_loss(amp(program, policy)), _BY)
    return amp(jax.grad(_loss(program), _BY), policy)


def _distance(island: Island, fn: Any, point: Point, low: str, quantity: str) -> float:
    before, after = (np.eye(a.shape[-1], dtype=np.float32) for a in (point.x, point.value))
    result = fn(point.x, island.params, point.cotangent, island.extras, before, after)
    return distance(result, point.value if quantity == "value" else point.gradient, low)


@functools.cache
def _point(name: str, low: str, where: str) -> Point:
    island, dtype = ISLANDS[name], LOW[low]
    x = island.input(where, dtype)
    value = np.asarray(_value(name)(x, island.params, island.extras))
    noise = np.random.default_rng(0).standard_normal(value.shape)
    cotangent = noise.astype(dtype).astype(np.float32)
    return Point(x, cotangent, value, _gradient(name)(x, island.params, cotangent, island.extras))


@functools.cache
def _value(name: str) -> Any:
    return _compiled(ISLANDS[name].fn)


@functools.cache
def _gradient(name: str) -> Any:
    return _compiled(jax.grad(_loss(ISLANDS[name].fn), _BY))


def _loss(fn: Any) -> Any:
    return lambda x, params, cotangent, *rest: jnp.sum(fn(x, params, *rest) * cotangent)


def _compiled(fn: Any) -> Any:
    """Compiled fast rather than well."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})
