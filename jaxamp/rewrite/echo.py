"""The identity whose cotangent comes back narrow, as a primitive of its own.

A sum of an activation that is stored narrow and a broadcast parameter has one cotangent for both.
The activation's is rounded, the parameter's is summed over rows in another kernel. Rounded before
they part, the two kernels share what is in memory.
"""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxamp.formats import Precision
from jaxamp.rewrite.casts import cast, hold
from jaxamp.taxonomy import OpKind, Trait, register_op_kind

echo_p = Primitive("echo")
register_op_kind(echo_p, OpKind.BOUNDARY, trait=Trait.OPAQUE)


def echo(x: Any, precision: Precision | None) -> Any:
    """An array as it is, whose cotangent is rounded to a precision.

    Args:
      x: the array.
      precision: of its cotangent, which arrives and leaves in the dtype of `x`; ``None`` for that.
    """
    return x if precision is None else echo_p.bind(x, precision=precision)


def _transpose(cotangent: Any, x: Any, *, precision: Precision) -> Any:
    rounded = hold(cast(cotangent, precision))
    return [lax.convert_element_type(rounded, x.aval.dtype)]


def _batch(args: Any, dims: Any, *, precision: Precision) -> Any:
    return echo_p.bind(*args, precision=precision), dims[0]


def _same(x: Any, *, precision: Precision) -> Any:
    return x


echo_p.def_impl(_same)
echo_p.def_abstract_eval(_same)
ad.deflinear2(echo_p, _transpose)
batching.primitive_batchers[echo_p] = _batch
mlir.register_lowering(echo_p, mlir.lower_fun(_same, multiple_results=False))
