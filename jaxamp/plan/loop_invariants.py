"""Find other forms of loop invariants, which a loop gets beside its own operands.

A body that reads a cast of an invariant gets the cast, which is computed once, outside. A body that
gets an invariant narrow gets it in float32 too: its cotangents are summed over iterations, and have
the dtype of their primal value.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import Jaxpr, Var

from jaxamp.core.formats import Precision, is_narrow
from jaxamp.jaxprs.nested import Loop
from jaxamp.plan.decision import Also, Form, Forms, How, JaxprPlan


def rounded_outside(jaxpr: Jaxpr, hows: Sequence[How], invariants: int) -> Forms:
    """Return the casts of a loop's invariants that its body reads.

    Args:
      jaxpr: the body.
      hows: how each of its equations runs.
      invariants: number of its first inputs that are the same in every iteration.
    """
    if not invariants:
        return ()
    read = {
        eqn.invars[index]: precision or how.operands[index]
        for eqn, how in zip(jaxpr.eqns, hows, strict=True)
        for index, precision in how.also
    }
    return tuple((v, Form(read[v])) for v in jaxpr.invars[:invariants] if v in read)


def narrow_each_turn(
    jaxpr: Jaxpr, inputs: Sequence[Precision | None], invariants: int
) -> tuple[Var, ...]:
    """Return the invariants of a loop that are narrow in its body.

    Args:
      jaxpr: the body.
      inputs: precision in which each of its inputs arrives.
      invariants: number of the first inputs that are the same in every iteration.
    """
    pairs = zip(jaxpr.invars[:invariants], inputs, strict=False)
    return tuple(var for var, precision in pairs if is_narrow(precision))


def read_beside(loop: Loop, body: JaxprPlan) -> Also:
    """Return the operands of a loop that it reads twice, once in another form for its body."""
    first = loop.test_invariants
    place = {var: first + i for i, var in enumerate(loop.body.jaxpr.invars)}
    casts = [(place[var], form.precision) for var, form in body.rounded]
    return (*casts, *((place[var], Precision.F32) for var in body.turned))
