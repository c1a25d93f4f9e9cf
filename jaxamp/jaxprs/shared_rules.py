"""Let calls of one ``custom_jvp`` function share one body and one rule.

JAX traces such a function anew for every call, so that equal layers of a model look different.

See: https://github.com/jax-ml/jax/issues/12775
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.jaxprs.hashing import jaxpr_key
from jaxamp.jaxprs.nested import called


def share_rules(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a program in which equal ``custom_jvp_call`` parameters are one object.

    Args:
      closed: the program; only its outermost equations are looked at.

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
