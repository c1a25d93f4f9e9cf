"""Rewrite comparisons with zero to read the result of a ReLU.

`x > 0` equals `max(x, 0) > 0` for every number and NaN. Of a ReLU only the result is a residual: to
compare `x`, a backward pass would have to recompute it.

See: https://github.com/jax-ml/jax/issues/5458
"""

from __future__ import annotations

import operator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxamp.core import jax_compat
from jaxamp.jaxprs.nested import called, changed_inside
from jaxamp.plan.dataflow.regions import SIGNS


def compare_relu_results(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a program whose comparisons with zero read results of ``max(x, 0)``.

    Its results are the same, bit for bit; it is the same object if nothing is to be changed.

    >>> import jax
    >>> def rectified(x):
    ...     return jax.numpy.maximum(x, 0), x > 0
    >>> largest, comparison = compare_relu_results(jax.make_jaxpr(rectified)(1.0)).jaxpr.eqns
    >>> comparison.invars[0] is largest.outvars[0]
    True
    """
    jaxpr = _Comparisons().of(closed.jaxpr)
    return closed if jaxpr is closed.jaxpr else closed.replace(jaxpr=jaxpr)


class _Comparisons:
    """Rewriter of comparisons in a jaxpr and its nested ones; each jaxpr is rewritten once."""

    def __init__(self) -> None:
        self._changed: dict[int, Jaxpr] = {}
        self._closed: dict[tuple[int, ...], ClosedJaxpr] = {}
        self._is_relu: dict[int, bool] = {}

    def of(self, jaxpr: Jaxpr) -> Jaxpr:
        changed = self._changed.get(id(jaxpr))
        if changed is None:
            changed = self._changed[id(jaxpr)] = self._of(jaxpr)
        return changed

    def _of(self, jaxpr: Jaxpr) -> Jaxpr:
        relus: dict[Var, Var] = {}
        eqns: list[JaxprEqn] = []
        for eqn in jaxpr.eqns:
            operand = self._relu_operand(eqn)
            if operand is not None and not isinstance(eqn.outvars[0], jax_compat.DropVar):
                relus[operand] = eqn.outvars[0]
            elif relus and eqn.primitive.name in SIGNS:
                eqn = _compared(eqn, relus)
            eqns.append(changed_inside(eqn, self._body))
        is_same = all(map(operator.is_, eqns, jaxpr.eqns))
        return jaxpr if is_same else jaxpr.replace(eqns=eqns)

    def _body(self, body: ClosedJaxpr) -> ClosedJaxpr:
        jaxpr = self.of(body.jaxpr)
        if jaxpr is body.jaxpr:
            return body
        key = id(jaxpr), *map(id, body.consts)
        return self._closed.setdefault(key, body.replace(jaxpr=jaxpr))

    def _relu_operand(self, eqn: JaxprEqn) -> Var | None:
        """Return `x` if an equation, or the jaxpr that it calls, is ``max(x, 0)``; else `None`."""
        name = eqn.primitive.name
        if name == "max":
            first, second = eqn.invars
            operand = first if _is_zero(second) else second if _is_zero(first) else None
            return operand if isinstance(operand, Var) else None
        if name not in ("jit", "custom_jvp_call") or len(eqn.invars) != 1:
            return None
        body = called(eqn).jaxpr
        if id(body) not in self._is_relu:
            self._is_relu[id(body)] = self._is_relu_alone(body)
        operand = eqn.invars[0]
        return operand if self._is_relu[id(body)] and isinstance(operand, Var) else None

    def _is_relu_alone(self, body: Jaxpr) -> bool:
        if len(body.eqns) != 1 or body.constvars:
            return False
        (eqn,) = body.eqns
        return eqn.outvars == body.outvars and self._relu_operand(eqn) is body.invars[0]


def _compared(eqn: JaxprEqn, relus: dict[Var, Var]) -> JaxprEqn:
    """Return a comparison that reads ``max(x, 0)`` in place of its operand."""
    operand, zero = eqn.invars
    if isinstance(operand, Literal) or operand not in relus or not _is_zero(zero):
        return eqn
    return eqn.replace(invars=[relus[operand], zero])


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, Literal) and jax_compat.literal_value(atom) == 0
