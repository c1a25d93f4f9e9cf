"""Compute what is elementwise of logits anew for each equation that reads it.

XLA computes an exponential or a `tanh` once for all its readers, and stores it in float32. Each of
them reads logits in 16 bits instead, behind a barrier that keeps the copies apart. Every reader has
one: XLA leaves out a rounding that it sees, and an exponential of logits that are rounded is none
that a sum of others can divide.

A label is looked up in the logits, before what is computed of them for all words: an element of
`log_softmax(x)` is `x[label]` less a maximum and a logarithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive

from jaxamp.core import jax_compat
from jaxamp.core.define import define
from jaxamp.core.taxonomy import OpKind, Trait
from jaxamp.found.cross_entropy.rows import is_elementwise

apart_p = Primitive("read_anew")
apart_p.multiple_results = True

_REPEATED = frozenset({"broadcast_in_dim", "iota"})


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
            if self._is_pending(eqn):
                self.pending[eqn.outvars[0]] = eqn
            else:
                operands = self._read(eqn.invars)
                if eqn.primitive.name == "dot_general":  # what products read is stored
                    self.values |= {v: x for v, x in zip(eqn.invars, operands, strict=True)
                                    if not isinstance(v, Literal)}  # fmt: skip
                with jax_compat.emitting(eqn):
                    self.values |= zip(eqn.outvars, jax_compat.bind(eqn, operands), strict=True)
        return self._read(self.jaxpr.outvars)

    def _is_pending(self, eqn: JaxprEqn) -> bool:
        """Return whether an equation waits for its readers: its result is large and elementwise."""
        is_one = is_elementwise(eqn) or eqn.primitive.name in _REPEATED
        return is_one and len(eqn.outvars) == 1 and 2 * _size(eqn.outvars[0]) >= self.size

    def _read(self, operands: Sequence[Any]) -> list[Any]:
        """Return operands of one reader."""
        sources: dict[Any, None] = {}
        for var in operands:
            if not isinstance(var, Literal) and var not in self.values:
                self._collect(var, sources)
        copies: dict[Any, Any] = {}
        products = self.products.intersection(sources)
        if not products.isdisjoint(self.has_reader):
            own = [v for v in sources if v in products or _size(v) < self.size]
            copies = dict(zip(own, apart_p.bind(*(self.values[v] for v in own)), strict=True))
            self.values |= copies  # the next barrier is another one: XLA joins equal ones
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


def _same(*values: Any) -> list[Any]:
    return [*values]


def _apart(*values: Any) -> list[Any]:
    """Put each value behind its own barrier: XLA:GPU overwrites no operand that was in a tuple."""
    return [*map(lax.optimization_barrier, values)]


def _beside(values: Sequence[Any], others: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return apart_p.bind(*values), [*others]


define(
    apart_p, _same, _same, _beside, _beside, {None: _same, "cuda": _apart, "rocm": _apart},
    kind=OpKind.DATA_MOVEMENT, trait=Trait.SHAPE, taylor=_beside,
)  # fmt: skip
