"""The jaxprs that calls, loops and branches compute, and how to put others in their place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

# By the name of its parameter.
_BODIES = {
    "jit": "jaxpr",
    "scan": "jaxpr",
    "while": "body_jaxpr",
    "cond": "branches",
    "remat2": "jaxpr",
    "fused_group": "jaxpr",
}


def bodies(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """What an equation computes; nothing for one that holds no jaxpr, or holds it as a rule."""
    name = _BODIES.get(eqn.primitive.name)
    held = eqn.params[name] if name else ()
    held = held if isinstance(held, tuple) else (held,)
    return [h if isinstance(h, ClosedJaxpr) else ClosedJaxpr(h, ()) for h in held]


def holding(eqn: JaxprEqn, bodies: Iterable[ClosedJaxpr]) -> dict[str, Any]:
    """The parameter that holds these bodies, closed or open as it was."""
    name = _BODIES[eqn.primitive.name]
    held = eqn.params[name]
    if isinstance(held, tuple):
        return {name: tuple(bodies)}
    (body,) = bodies
    if isinstance(held, ClosedJaxpr):
        return {name: body}
    return {name: held if body.consts else body.jaxpr}  # an open one cannot hold constants
