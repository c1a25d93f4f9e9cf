"""Operands behind a barrier, as a primitive of its own: on a TPU there is none.

What is computed again of them is not to be merged with what was computed of them before, or its
float32 values stay in memory in between. XLA:TPU decides better by itself, as for the
checkpoints of groups in `interpreter.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxamp.taxonomy import OpKind, Trait, register_op_kind

apart_p = Primitive("apart")
apart_p.multiple_results = True
register_op_kind(apart_p, OpKind.BOUNDARY, trait=Trait.OPAQUE)


def apart(values: Sequence[Any]) -> list[Any]:
    """Arrays as they are; their tangents pass by."""
    return apart_p.bind(*values)


def _same(*values: Any) -> list[Any]:
    return list(values)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return apart(primals), list(tangents)


def _batch(values: Sequence[Any], dims: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
    return apart(values), dims


apart_p.def_impl(_same)
apart_p.def_abstract_eval(_same)
ad.primitive_jvps[apart_p] = _jvp
batching.primitive_batchers[apart_p] = _batch
mlir.register_lowering(
    apart_p, mlir.lower_fun(lambda *xs: lax.optimization_barrier(xs), multiple_results=True)
)
mlir.register_lowering(apart_p, mlir.lower_fun(_same, multiple_results=True), platform="tpu")
