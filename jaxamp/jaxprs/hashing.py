"""Keys that are equal for equal parts of jaxprs, and calls that share their rules by them.

A key is valid for as long as its jaxpr is alive: unhashable parameters are compared by identity.
JAX traces a ``custom_jvp`` function anew for every call, so that equal layers look different.

See: https://github.com/jax-ml/jax/issues/12775
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxamp.core import jax_compat
from jaxamp.jaxprs.interpret import walk
from jaxamp.jaxprs.nested import called


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


def share_rules(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a program whose outermost equal ``custom_jvp_call`` parameters are one object.

    >>> import jax
    >>> def twice(x):
    ...     for _ in range(2):
    ...         x = jax.nn.relu(x)
    ...     return x
    >>> first, second = share_rules(jax.make_jaxpr(twice)(1.0)).jaxpr.eqns
    >>> first.params is second.params
    True
    """
    known: dict[Hashable, dict[str, Any]] = {}
    eqns = [_shared(eqn, known) for eqn in closed.jaxpr.eqns]
    return closed.replace(jaxpr=closed.jaxpr.replace(eqns=eqns)) if known else closed


def _shared(eqn: JaxprEqn, known: dict[Hashable, dict[str, Any]]) -> JaxprEqn:
    rule = jax_compat.jvp_rule(eqn)
    if rule is None:
        return eqn
    params = eqn.params
    body = jaxpr_key(called(eqn).jaxpr)
    key = rule, body, params["num_consts"], params["symbolic_zeros"]
    return eqn.replace(params=known.setdefault(key, params))
