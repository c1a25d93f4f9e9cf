"""How a primitive that carries jaxprs is wired to them: which value goes where.

The one place of the planner that reads the parameters of higher-order primitives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxamp.core import jax_compat

REGION_PREFIX = "jaxamp_region"  # name of the jit that holds what `amp` has already rewritten
RULED = frozenset({"custom_jvp_call", "custom_vjp_call"})  # have derivatives of their own


@dataclass(frozen=True, slots=True)
class Body:
    """A jaxpr inside an equation, with its constants."""

    jaxpr: Jaxpr
    consts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """A scan or while loop; operands are (test invariants, invariants, inits, sliced inputs)."""

    test: Body | None
    body: Body
    test_invariants: int
    invariants: int
    carries: int
    always_kept: bool  # a while loop runs until its carry says so: its dtype is part of the test


def body_of(param: Any) -> Body:
    """The jaxpr in a parameter, open or closed."""
    if isinstance(param, ClosedJaxpr):
        return Body(param.jaxpr, tuple(param.consts))
    return Body(param, ())


def call_body(eqn: JaxprEqn) -> Body:
    """The body of a transparent call, which takes and gives what the equation does."""
    name = next(n for n in ("call_jaxpr", "jaxpr", "fwd_jaxpr") if n in eqn.params)
    return body_of(eqn.params[name])


def branches(eqn: JaxprEqn) -> tuple[Body, ...]:
    """The bodies of a cond or switch; operand 0 chooses, the others go to each."""
    return tuple(body_of(b) for b in eqn.params["branches"])


def loop(eqn: JaxprEqn) -> Loop:
    """The wiring of a scan or while equation."""
    params = eqn.params
    if "cond_jaxpr" in params:
        test, body = body_of(params["cond_jaxpr"]), body_of(params["body_jaxpr"])
        carries = len(body.jaxpr.outvars)
        return Loop(test, body, params["cond_nconsts"], params["body_nconsts"], carries, True)
    invariants, carries = jax_compat.scan_layout(eqn)
    return Loop(None, body_of(params["jaxpr"]), 0, invariants, carries, False)


def nested_params(eqn: JaxprEqn) -> tuple[str, ...]:
    """Names of the parameters of some other primitive that hold one jaxpr each."""
    return tuple(k for k, v in eqn.params.items() if isinstance(v, Jaxpr | ClosedJaxpr))


def is_region(eqn: JaxprEqn) -> bool:
    """Whether an inner ``amp`` has already rewritten what this call holds."""
    return str(eqn.params.get("name", "")).startswith(REGION_PREFIX)
