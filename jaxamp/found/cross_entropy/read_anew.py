"""Compute what is elementwise of logits anew for each equation that reads it.

XLA computes an exponential or a `tanh` once for all its readers, and stores it in float32. Each of
them reads logits in 16 bits instead, behind a barrier that keeps the copies apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import OpKind, lookup

_BESIDE = frozenset({"convert_element_type", "stop_gradient", "copy", "broadcast_in_dim", "iota",
                     "add_any"})  # fmt: skip


def read_anew(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function of arrays."""

    def each(*given: Any) -> Any:
        closed, shapes = jax.make_jaxpr(body, return_shape=True)(*given)
        results = _Readers(closed, jax.tree.leaves(given)).results()
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return each


class _Readers:
    """Evaluation of a jaxpr, where a reader of logits has its own copy of what is elementwise."""

    def __init__(self, closed: ClosedJaxpr, operands: Sequence[Any]) -> None:
        self.jaxpr = closed.jaxpr
        self.values: dict[Any, Any] = dict(zip(self.jaxpr.constvars, closed.consts, strict=True))
        self.values |= zip(self.jaxpr.invars, operands, strict=True)
        products = [e.outvars[0] for e in closed.jaxpr.eqns if e.primitive.name == "dot_general"]
        self.products = frozenset(products)
        self.size: int = products[0].aval.size  # type: ignore[attr-defined]
        self.pending: dict[Any, JaxprEqn] = {}
        self.has_reader: set[Any] = set()

    def results(self) -> list[Any]:
        """Return the results of the jaxpr."""
        for eqn in self.jaxpr.eqns:
            if self._is_elementwise(eqn):
                self.pending[eqn.outvars[0]] = eqn
                continue
            operands = self._read(eqn.invars)
            if eqn.primitive.name == "dot_general":  # what products read is stored
                self.values |= {v: x for v, x in zip(eqn.invars, operands, strict=True)
                                if not isinstance(v, Literal)}  # fmt: skip
            with jax_compat.emitting(eqn):
                self.values |= zip(eqn.outvars, jax_compat.bind(eqn, operands), strict=True)
        return self._read(self.jaxpr.outvars)

    def _is_elementwise(self, eqn: JaxprEqn) -> bool:
        op, name = lookup(eqn.primitive), eqn.primitive.name
        is_one = name in _BESIDE or (op is not None and op.kind is OpKind.ELEMENTWISE)
        return is_one and len(eqn.outvars) == 1 and 2 * _size(eqn.outvars[0]) >= self.size

    def _read(self, operands: Sequence[Any]) -> list[Any]:
        """Return operands of one reader."""
        sources: dict[Any, None] = {}
        for var in operands:
            if not isinstance(var, Literal) and var not in self.values:
                self._collect(var, sources)
        products = self.products.intersection(sources)
        copies: dict[Any, Any] = {}
        if not products.isdisjoint(self.has_reader):
            own = [v for v in sources if v in products or _size(v) < self.size]
            apart = lax.optimization_barrier([self.values[v] for v in own])
            copies = dict(zip(own, apart, strict=True))
        self.has_reader |= products
        return [self._value(var, copies) for var in operands]

    def _collect(self, var: Any, sources: dict[Any, None]) -> None:
        """Collect the values at hand that another one is computed of."""
        if isinstance(var, Literal):
            return
        if var in self.values:
            sources[var] = None
            return
        for operand in self.pending[var].invars:
            self._collect(operand, sources)

    def _value(self, var: Any, copies: dict[Any, Any]) -> Any:
        if isinstance(var, Literal):
            return jax_compat.literal_value(var)
        if var not in copies:
            if var in self.values:
                return self.values[var]
            eqn = self.pending[var]
            operands = [self._value(operand, copies) for operand in eqn.invars]
            with jax_compat.emitting(eqn):
                (copies[var],) = jax_compat.bind(eqn, operands)
        return copies[var]


def _size(var: Any) -> int:
    return int(var.aval.size)
