"""Find other forms of loop invariants, which a loop gets beside its own operands.

A body that reads a cast of an invariant gets the cast, which is computed once, outside. A body that
gets an invariant narrow gets it in float32 too: its cotangents are summed over iterations, and have
the dtype of their primal value.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import Jaxpr

from jaxamp.core.formats import Precision, is_narrow
from jaxamp.jaxprs.nested import Loop
from jaxamp.plan.decision import EquationPlan, InputCast, JaxprPlan


def find_invariant_casts(
    jaxpr: Jaxpr, plans: Sequence[EquationPlan], invariants: int
) -> tuple[InputCast, ...]:
    """Return the casts of a loop's invariants that its body reads.

    Args:
      jaxpr: the body.
      plans: those of its equations.
      invariants: number of its first inputs that are the same in every iteration.
    """
    if not invariants:
        return ()
    read = {
        eqn.invars[index]: precision or plan.reads[index].precision
        for eqn, plan in zip(jaxpr.eqns, plans, strict=True)
        for index, precision in plan.second_reads
    }
    casts = ((i, read.get(var)) for i, var in enumerate(jaxpr.invars[:invariants]))
    return tuple(InputCast(i, precision) for i, precision in casts if precision)


def find_wide_invariants(inputs: Sequence[Precision | None], invariants: int) -> tuple[int, ...]:
    """Return the invariants of a loop that are narrow in its body, by index.

    Args:
      inputs: precision in which each input of the body arrives.
      invariants: number of the first inputs that are the same in every iteration.
    """
    return tuple(i for i, precision in enumerate(inputs[:invariants]) if is_narrow(precision))


def other_operands(loop: Loop, body: JaxprPlan) -> tuple[tuple[InputCast, ...], tuple[int, ...]]:
    """Return the casts and the wide invariants of a body, by index of the loop's operands.

    The inputs of a body are the operands that follow the invariants of the loop's test.
    """
    first = loop.test_invariants
    casts = tuple(InputCast(first + i, precision) for i, precision in body.invariant_casts)
    return casts, tuple(first + i for i in body.wide_invariants)
