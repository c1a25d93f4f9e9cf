"""Types of values: arrays, Refs, tangents, and zeros that are no arrays yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import ad_util as _ad_util
from jax._src import core as _core
from jax._src.state import types as _state
from jax.extend.core import JaxprEqn

ShapedArray = _core.ShapedArray
Zero = _ad_util.Zero
_WRITES = (_state.WriteEffect, _state.AccumEffect)


def is_plain_array(aval: Any) -> bool:
    """Return whether an aval is that of an array, rather than of a Ref, a token or a PRNG key."""
    return type(aval) is ShapedArray


def is_castable(aval: Any) -> bool:
    """Return whether an aval is that of an array that JAX casts.

    JAX 0.10.2 asserts that no array is reduced or unreduced on a mesh of axes of several types.
    """
    if not is_plain_array(aval):
        return False
    mesh, spec, manual = aval.sharding.mesh, aval.sharding.spec, aval.manual_axis_type
    is_of_one_type = mesh.are_all_axes_manual or mesh.are_all_axes_explicit
    return is_of_one_type or not any((*_sums(spec), *_sums(manual)))


def _sums(places: Any) -> tuple[frozenset[Any], frozenset[Any]]:
    return places.unreduced, places.reduced


def lie_alike(one: Any, other: Any) -> bool:
    """Return whether two arrays lie alike, as far as their types say: on one mesh, or anywhere.

    Types of no mesh, such as that of a constant, say nothing, as those of automatic axes.
    """
    places = one.sharding, other.sharding
    return places[0] == places[1] or all(p.mesh.empty or p.mesh.are_all_axes_auto for p in places)


def is_ref(aval: Any) -> bool:
    """Return whether an aval is that of a mutable array."""
    return isinstance(aval, _state.AbstractRef)


def vary_alike(values: Sequence[Any]) -> list[Any]:
    """Return `values`, varying along the same manual mesh axes of a ``shard_map``: those of all."""
    return list(_core.auto_insert_reshard(*values))


def varies_over(aval: Any) -> frozenset[Any]:
    """Return the manual mesh axes of a ``shard_map`` along which an array may differ."""
    return aval.manual_axis_type.varying


def is_partly_manual() -> bool:
    """Return whether code that runs now is that of a ``shard_map`` over some axes of a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 0 < len(mesh.manual_axes) < len(mesh.axis_names)


def writes_to_ref(eqn: JaxprEqn) -> bool:
    """Return whether an equation writes to a mutable array among its operands."""
    return any(isinstance(effect, _WRITES) for effect in eqn.effects)


def has_typed_sharding(aval: Any) -> bool:
    """Return whether the mesh of an array is explicit: its sharding is part of its type."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return jax.sharding.AxisType.Explicit in (getattr(mesh, "axis_types", None) or ())


def is_symbolic_zero(value: Any) -> bool:
    """Return whether a tangent or cotangent is a symbolic zero."""
    return isinstance(value, Zero | jax.custom_derivatives.SymbolicZero)


def to_cotangent_aval(aval: Any) -> Any:
    """Return the aval of a cotangent of ``aval`` (float0 for integers)."""
    return aval.to_ct_aval()


def zero_cotangent(aval: Any) -> Any:
    """Return the zero that a flat ``custom_vjp`` backward rule returns for a cotangent."""
    return Zero(aval.to_ct_aval())


def symbolic_zero_like(value: Any) -> Any:
    """Return the zero that the JVP rule of a primitive returns for a tangent."""
    return Zero(jax.typeof(value).to_tangent_aval())
