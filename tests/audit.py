"""Looks into jaxprs: which products run in which dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core

# `accumulate` is jaxamp's own: a product of operands that it rounds, and accumulates in float32.
PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general", "accumulate"})
OPAQUE = frozenset({"pallas_call"})
LOW = frozenset({jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)})


@dataclasses.dataclass(frozen=True)
class Product:
    """A dot or convolution of a jaxpr: operand dtypes, and whether the user asked for float32."""

    primitive: str
    operands: tuple[jnp.dtype, jnp.dtype]
    kept: bool

    @property
    def is_float(self) -> bool:
        """Whether real floating numbers are multiplied."""
        return all(jnp.issubdtype(d, jnp.floating) for d in self.operands)

    @property
    def is_low(self) -> bool:
        """Whether both operands are bfloat16 or float16."""
        return LOW.issuperset(self.operands)

    @property
    def is_mixed(self) -> bool:
        """Whether the operands differ in dtype, so that the wider one decides the speed."""
        return self.is_float and self.operands[0] != self.operands[1]


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Every equation of `jaxpr` and of the jaxprs inside it, kernels excepted."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name not in OPAQUE:
            for inner in core.jaxprs_in_params(eqn.params):
                yield from equations(inner)


def products(jaxpr: core.Jaxpr) -> list[Product]:
    """Every dot and convolution of `jaxpr`."""
    return [_product(e) for e in equations(jaxpr) if e.primitive.name in PRODUCTS]


def _product(eqn: core.JaxprEqn) -> Product:
    how = eqn.params.get("how")  # what `accumulate` rounds its operands to
    a, b = (how.narrow if how else jnp.dtype(_typed(v).dtype) for v in eqn.invars[:2])
    scope = str(eqn.source_info.name_stack)
    kept = (
        "keep_precision" in scope
        or _is_explicit(eqn.params.get("precision"))
        or _is_vector_product(eqn)
    )
    return Product(eqn.primitive.name, (a, b), kept)


def _typed(atom: Any) -> Any:
    return atom.aval


def _is_vector_product(eqn: core.JaxprEqn) -> bool:
    """Whether a dot is an inner product, a reduction, or an outer one, which is elementwise."""
    if eqn.primitive.name != "dot_general":
        return False
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    return not contracted or len(batch) == len(_typed(eqn.outvars[0]).shape)


def _is_explicit(precision: object) -> bool:
    if isinstance(precision, tuple):
        return any(_is_explicit(p) for p in precision)
    return precision not in (None, lax.Precision.DEFAULT)
