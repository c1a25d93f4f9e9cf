"""A fused group as one equation, differentiated as ``jax.checkpoint`` is.

The backward pass of a group keeps what `keep` marks and computes the rest of it again. The equation
is of a primitive of jaxamp's own, so that how it is lowered is too: checkpoints that users write
are lowered by JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import OpKind, Trait, register_op_kind

kept_p = Primitive("kept")
register_op_kind(kept_p, OpKind.DATA_MOVEMENT, trait=Trait.SHAPE)


def keep(value: Any) -> Any:
    """Mark what the backward pass of a fused group reads rather than computes again."""
    return kept_p.bind(value)


def _saves(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive is kept_p


fused_group_p = Primitive("fused_group")
register_op_kind(fused_group_p, OpKind.BOUNDARY, trait=Trait.CALL, dtype_params=("jaxpr",))
call_fused = jax_compat.define_checkpoint(fused_group_p, _saves)
"""Call a flat function as one fused group."""


def _jet_of_kept(primals: Sequence[Any], series: Sequence[Sequence[Any]]) -> Any:
    return primals[0], series[0]


kept_p.def_impl(lambda value: value)
kept_p.def_abstract_eval(lambda value: value)
ad.primitive_jvps[kept_p] = lambda primals, tangents: (keep(*primals), *tangents)
batching.primitive_batchers[kept_p] = lambda args, dims: (keep(*args), *dims)
jet.jet_rules[kept_p] = _jet_of_kept
mlir.register_lowering(kept_p, lambda context, value: [value])
