"""What a loop is handed beside its own operands: other forms of what is the same in every turn.

A body that reads a cast of an invariant gets that cast, which is made once, outside. A body that
gets an invariant narrow gets it in float32 too: its cotangents are added up over the turns, and
have the format of what they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import Jaxpr, Var

from jaxamp.core.formats import Precision, is_narrow
from jaxamp.jaxprs import nested as wiring
from jaxamp.plan.decision import Also, Form, Forms, How, JaxprPlan


def rounded_outside(jaxpr: Jaxpr, hows: Sequence[How], invariants: int) -> Forms:
    """The casts of a loop's invariants that its body reads.

    Args:
      jaxpr: the body.
      hows: how each of its equations runs.
      invariants: how many of its first inputs are the same in every turn.
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
    """The invariants of a loop that are narrow in its body.

    Args:
      jaxpr: the body.
      inputs: precision in which each of its inputs arrives.
      invariants: how many of the first inputs are the same in every turn.
    """
    pairs = zip(jaxpr.invars[:invariants], inputs, strict=False)
    return tuple(var for var, precision in pairs if is_narrow(precision))


def read_beside(loop: wiring.Loop, body: JaxprPlan) -> Also:
    """The operands of a loop that it reads a second time, for what its body is handed beside."""
    first = loop.test_invariants
    place = {var: first + i for i, var in enumerate(loop.body.jaxpr.invars)}
    casts = [(place[var], form.precision) for var, form in body.rounded]
    return (*casts, *((place[var], Precision.F32) for var in body.turned))
