"""Define a primitive of jaxamp: evaluation, types, derivatives, vmap and lowering in one call."""

from __future__ import annotations

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxamp.core.taxonomy import OpKind, Trait, register_op_kind


def define(primitive: Primitive, direct: Any, typed: Any, jvp: Any, batch: Any) -> None:
    """Define a primitive by functions on arrays, for every backend.

    Args:
      primitive: the primitive. To the planner it is opaque.
      direct: computes its results by other primitives.
      typed: its abstract evaluation rule.
      jvp: its JVP rule.
      batch: its batching rule.
    """
    params = {"multiple_results": primitive.multiple_results}
    primitive.def_impl(direct)
    primitive.def_abstract_eval(typed)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(direct, **params))
    register_op_kind(primitive, OpKind.BOUNDARY, trait=Trait.OPAQUE)
