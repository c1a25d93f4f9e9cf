"""Find slopes: numbers of a bias that all keys of a row share, as of a bias by distance.

Cotangents of the scores of a row add up to zero. That of a slope is a sum of them in which keys
have different weights, and so nearly cancels. Kernels return the cotangents in 16 bits, and take
their mean from an output of 16 bits: what a row's cotangents then add up to, and their roundings,
are multiplied by distances. The form written out adds up cotangents of float32.

Numbers that come from a product are no slopes: cotangents are rounded before they are contracted,
there too. What is looked up is none either, as keys have numbers of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxamp.core.taxonomy import OpKind, lookup
from jaxamp.found.attention.match import Bias
from jaxamp.found.attention.scores import LEAST, Scores
from jaxamp.found.levels import Atom, Unit
from jaxamp.found.values import Axis, Place, Value, reshaped, single
from jaxamp.jaxprs.known_arrays import KnownArrays

_KINDS = (OpKind.ELEMENTWISE, OpKind.DATA_MOVEMENT)
_LOOKUPS = ("gather", "dynamic_slice")


def has_slope(step: Bias, keys: tuple[Axis, ...], scores: Scores) -> bool:
    """Return whether a bias is made of real numbers, not known ones, that keys of a row share."""
    known, base, home = scores.known, step.factor.base, scores.home(step.factor)
    is_mask = abs(step.number) >= -LEAST
    if is_mask or home is None or scores.algebra.bases[base].kind != "leaf":
        return False
    pending: list[tuple[Atom, Value]] = [(home, single(base, (keys,), step.factor.places))]
    seen = set[tuple[int, tuple[Place, ...]]]()
    while pending:
        atom, value = pending.pop()
        if isinstance(atom, Literal) or atom in known or (atom, value.places) in seen:
            continue
        seen.add((atom, value.places))
        unit = scores.level.makers.get(atom)
        if unit is None or not is_arithmetic(unit):
            (monomial,) = value.terms
            if all(factor.axes.isdisjoint(value.axes) for factor, _ in monomial):
                return True
        elif not _is_mask(unit, known):
            pending += _operands(unit, value)
    return False


def is_arithmetic(unit: Unit) -> bool:
    """Return whether it is arithmetic of each element or a move, but no lookup."""
    op, name = lookup(unit.eqn.primitive), unit.eqn.primitive.name
    return op is not None and op.kind in _KINDS and name not in _LOOKUPS


def _is_mask(unit: Unit, known: KnownArrays) -> bool:
    """Return whether a product has so large a known factor that nothing but a mask has."""
    return unit.eqn.primitive.name == "mul" and any(
        atom in known and bool(np.any(np.abs(known.thin(atom)) >= -LEAST)) for atom in unit.ins
    )


def _operands(unit: Unit, value: Value) -> Iterator[tuple[Atom, Value]]:
    """Yield real operands of an elementwise operation or a move, along the axes of its result."""
    for atom, shape in floats_of(unit):
        inside = _inside(unit, value, shape)
        if inside is not None:
            yield atom, inside


def floats_of(unit: Unit) -> list[tuple[Atom, tuple[int, ...]]]:
    """Return the operands that are real numbers, and their shapes."""
    avals: list[Any] = [var.aval for var in unit.eqn.invars]
    return [
        (atom, aval.shape)
        for atom, aval in zip(unit.ins, avals, strict=True)
        if jnp.issubdtype(getattr(aval, "dtype", np.bool_), np.floating)
    ]


def _inside(unit: Unit, value: Value, shape: tuple[int, ...]) -> Value | None:
    """Return the value that an operand has; ``None`` where its axes are not known."""
    places, params = value.places, unit.eqn.params
    match unit.eqn.primitive.name:
        case "broadcast_in_dim":
            at = params["broadcast_dimensions"]
            kept = (places[i] if n > 1 else () for i, n in zip(at, shape, strict=True))
            return Value(tuple(kept), value.terms)
        case "transpose":
            order = params["permutation"]
            return Value(tuple(places[order.index(i)] for i in range(len(order))), value.terms)
        case "reshape" | "squeeze":
            return reshaped(value, shape)
    return value if len(shape) == len(places) else None
