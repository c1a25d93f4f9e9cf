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
    """Whether an aval is an array value, rather than a Ref, a token or a key of some kind."""
    return type(aval) is ShapedArray


def is_ref(aval: Any) -> bool:
    """Whether an aval is a mutable array's."""
    return isinstance(aval, _state.AbstractRef)


def vary_alike(values: Sequence[Any]) -> list[Any]:
    """Values that vary along the same manual mesh axes: those of all, inside of ``shard_map``."""
    return list(_core.auto_insert_reshard(*values))


def writes_to_ref(eqn: JaxprEqn) -> bool:
    """Whether an equation writes to a mutable array that it is given."""
    return any(isinstance(effect, _WRITES) for effect in eqn.effects)


def has_typed_sharding(aval: Any) -> bool:
    """Whether the mesh of an array is explicit: each result's sharding is part of its type."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return jax.sharding.AxisType.Explicit in (getattr(mesh, "axis_types", None) or ())


def is_symbolic_zero(value: Any) -> bool:
    """Whether a tangent or cotangent is a zero that was never made into an array."""
    return isinstance(value, Zero | jax.custom_derivatives.SymbolicZero)


def retyped_zero(zero: Any, dtype: Any) -> Any:
    """A symbolic zero of the same kind for another dtype."""
    return type(zero)(zero.aval.update(dtype=dtype))


def to_tangent_aval(aval: Any) -> Any:
    """The aval of a tangent of ``aval`` (float0 for integers)."""
    return aval.to_tangent_aval()


def to_cotangent_aval(aval: Any) -> Any:
    """The aval of a cotangent of ``aval`` (float0 for integers)."""
    return aval.to_ct_aval()


def zero_tangent(aval: Any) -> Any:
    """What a ``custom_jvp`` rule returns for a tangent that is zero."""
    return jax.custom_derivatives.SymbolicZero(aval.to_tangent_aval())


def zero_cotangent(aval: Any) -> Any:
    """What a flat ``custom_vjp`` backward rule returns for a cotangent that is zero."""
    return Zero(aval.to_ct_aval())


def symbolic_zero_like(value: Any) -> Any:
    """What a primitive's jvp rule returns for a tangent that is zero."""
    return Zero(jax.typeof(value).to_tangent_aval())
