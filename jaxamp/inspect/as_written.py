"""The plan of what runs as it is written: an amp inside has rewritten it already."""

from __future__ import annotations

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxamp.core.taxonomy import op_of
from jaxamp.jaxprs.nested import is_region, nested
from jaxamp.plan import Decision, Ground, JaxprPlan, OperandRead
from jaxamp.plan.decision import EquationPlan, Hints

WRITTEN = Ground("rewritten already, by an amp inside", None, "")
_AS_IT_IS = OperandRead(None)
Body = tuple[ClosedJaxpr, JaxprPlan]


def bodies_of(eqn: JaxprEqn, decision: Decision) -> list[Body]:
    """Return the jaxprs of an equation that are entered, with their plans."""
    bodies, plans = nested(eqn), decision.plan.inner
    if is_region(eqn):
        plans = plans or tuple(as_written(body.jaxpr) for body in bodies)
    return list(zip(bodies, plans, strict=True)) if plans else []


def as_written(jaxpr: Jaxpr) -> JaxprPlan:
    """Return the plan in which nothing changes, of a jaxpr and of those inside."""
    return JaxprPlan(
        inputs=(None,) * len(jaxpr.invars),
        decisions=tuple(map(_decision, jaxpr.eqns)),
        outputs=(None,) * len(jaxpr.outvars),
        unchanged=True,
        steps=tuple(range(len(jaxpr.eqns))),
    )


def _decision(eqn: JaxprEqn) -> Decision:
    results = len(eqn.outvars)
    plan = EquationPlan(
        reads=(_AS_IT_IS,) * len(eqn.invars),
        outputs=(None,) * results,
        hints=Hints((False,) * results, (False,) * results),
        inner=tuple(as_written(body.jaxpr) for body in nested(eqn)),
    )
    return Decision(eqn, plan, op_of(eqn.primitive).kind, WRITTEN)
