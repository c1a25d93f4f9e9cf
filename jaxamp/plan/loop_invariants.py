"""Find other forms of loop invariants, which a loop gets beside its own operands.

A body that reads a cast of an invariant gets the cast, which is computed once, outside. A body that
gets an invariant narrow gets it in float32 too: its cotangents are summed over iterations, and have
the dtype of their primal value.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import Jaxpr

from jaxamp.core.formats import Precision, is_narrow
from jaxamp.plan.decision import EquationPlan, InputCast


def find_invariant_forms(
    jaxpr: Jaxpr, plans: Sequence[EquationPlan], invariants: Sequence[Precision | None]
) -> tuple[InputCast, ...]:
    """Return the forms of a loop's invariants that its body gets beside them.

    Args:
      jaxpr: the body.
      plans: those of its equations.
      invariants: precisions of its first inputs, which are the same in every iteration.
    """
    if not invariants:
        return ()
    read = {
        eqn.invars[index]: precision or plan.reads[index].precision
        for eqn, plan in zip(jaxpr.eqns, plans, strict=True)
        for index, precision in plan.second_reads
    }
    casts = ((i, read.get(var)) for i, var in enumerate(jaxpr.invars[: len(invariants)]))
    narrow = [InputCast(i, Precision.F32) for i, p in enumerate(invariants) if is_narrow(p)]
    return (*(InputCast(i, p) for i, p in casts if p not in (None, Precision.F32)), *narrow)
