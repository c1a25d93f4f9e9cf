"""Keys that are equal for equal parts of jaxprs.

A key is valid for as long as its jaxpr is alive: unhashable parameters are compared by identity.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxamp.core import jax_compat
from jaxamp.jaxprs.interpret import walk


def jaxpr_key(jaxpr: Jaxpr) -> Hashable:
    """Return a key that is equal for jaxprs of equal equations from the same source lines.

    >>> import jax
    >>> one, two = (jax.make_jaxpr(lambda x: x + 1.0)(2.0).jaxpr for _ in range(2))
    >>> jaxpr_key(one) == jaxpr_key(two)
    True
    >>> one, two = (jax.make_jaxpr(lambda x: x + term)(2.0).jaxpr for term in (1.0, 3.0))
    >>> jaxpr_key(one) == jaxpr_key(two)
    False
    """
    numbers = itertools.count()
    lines: list[Hashable] = []

    def visit(eqn: JaxprEqn, operands: Sequence[Hashable]) -> list[int]:
        origin = jax_compat.origin(eqn, jax_compat.CommonNames())
        line = eqn.primitive, params_key(eqn.params), origin, len(eqn.outvars)
        lines.append((*line, *operands))
        return [next(numbers) for _ in eqn.outvars]

    consts, args = ([next(numbers) for _ in vs] for vs in (jaxpr.constvars, jaxpr.invars))
    results = walk(jaxpr, consts, args, visit, literal_key)
    avals = tuple(v.aval for v in (*jaxpr.constvars, *jaxpr.invars))
    return avals, tuple(lines), tuple(results)


def literal_key(literal: Literal) -> Hashable:
    """Return a key of the type and the bits of a literal."""
    value = jax_compat.literal_value(literal)
    return literal.aval, value.tobytes() if hasattr(value, "tobytes") else value


def params_key(params: Mapping[str, Any]) -> Hashable:
    """Return a key of an equation's parameters."""
    values = tuple(params.values())
    try:
        hash(values)
    except TypeError:
        values = map(_identity, values)
    return (*params, *values)


def _identity(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
