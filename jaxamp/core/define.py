"""Define a primitive of jaxamp: evaluation, types, derivatives, vmap and lowering in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxamp.core.taxonomy import OpKind, Trait, register_op_kind


def define(
    primitive: Primitive,
    direct: Callable[..., Any],
    typed: Callable[..., Any],
    batch: Callable[..., Any],
    jvp: Callable[..., Any] | None = None,
    lowered: Mapping[str | None, Callable[..., Any]] | None = None,
    *,
    kind: OpKind = OpKind.BOUNDARY,
    trait: Trait = Trait.OPAQUE,
) -> None:
    """Define a primitive by functions on arrays.

    Args:
      primitive: the primitive.
      direct: computes its results by other primitives.
      typed: its abstract evaluation rule.
      batch: its batching rule.
      jvp: its JVP rule; left out, the caller defines derivatives.
      lowered: what computes its results in a compiled program, per platform, ``None`` for all
        others; left out, `direct` does on all.
      kind: kind of the primitive.
      trait: what the planner knows of it.
    """
    primitive.def_impl(direct)
    primitive.def_abstract_eval(typed)
    batching.primitive_batchers[primitive] = batch
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
    for platform, function in ({None: direct} if lowered is None else lowered).items():
        rule = mlir.lower_fun(function, multiple_results=primitive.multiple_results)
        mlir.register_lowering(primitive, rule, platform=platform)
    register_op_kind(primitive, kind, trait=trait)
