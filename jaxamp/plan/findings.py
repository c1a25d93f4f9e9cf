"""The findings on a program, drafts of its precisions, and hints, from which a plan is assembled.

Hints are plain data, computed from the findings by a feature that knows the compiler; by default
there are none. No hint changes the precision of an equation or of a stored value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from jax.extend.core import Jaxpr, Var

from jaxamp.core.formats import Precision
from jaxamp.plan.conditioning.hazards import Hazards
from jaxamp.plan.dataflow.dataflow import Dataflow
from jaxamp.plan.dataflow.fused_groups import Groups
from jaxamp.plan.decision import (
    CotangentRounding,
    Fusion,
    FusionCall,
    JaxprPlan,
    RematerializedInput,
)
from jaxamp.plan.graph.graph import Frame, Nest, Node
from jaxamp.plan.precision.choose import Choice
from jaxamp.plan.precision.operand_reads import OperandReads
from jaxamp.plan.precision.overrides import Forced
from jaxamp.policy.policy import PrecisionPolicy

Precisions = Sequence[Precision | None]
Groupings = Sequence[Sequence[int]]  # by indices of equations


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Precisions of a program so far, of which a pass makes new choices for some nodes."""

    policy: PrecisionPolicy
    # The program, where its values come from, what they are for, and which are fused.
    flow: Dataflow
    hazards: Hazards  # what loses accuracy in a narrow format
    forced: Forced  # what the user has decided
    # Precision in which each value is stored, `None` where a policy has no say; a pass updates it.
    stored: list[Precision | None]
    choices: Mapping[Node, Choice]  # what was chosen for each node; a pass leaves it as it is


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Findings(Draft):
    """Precisions of a program as no pass changes them any more, and what follows from them."""

    frame: Frame  # the outermost jaxpr
    narrow: Precision | None  # precision of stored activations, if it is narrow
    exact_narrow: Set[int]  # values that stay narrow inside a fused group; see `exact.py`
    relu_signs: Set[int]  # ReLU results whose sign alone is read; see `regions.py`
    readings: OperandReads  # how each reader gets its operands
    # Groups of equations that share a kernel; `None` if nothing is to be fused.
    groups: Groups | None


class Outline:
    """Maker of the units in which a jaxpr is emitted: here each equation is one, as written."""

    def __init__(self) -> None:
        self.repeated: set[Fusion] = set()  # groups that have more than one place

    def steps(
        self, jaxpr: Jaxpr, plan: JaxprPlan, groups: Groupings, recomputed: Mapping[Var, int]
    ) -> tuple[int | FusionCall, ...]:
        """Return what to emit, in order, of groups of equations that are to be one unit.

        A group computes values again that it reads, by the equations of those `recomputed`.
        """
        return plan.steps


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Steering:
    """Compiler hints for one program; values and nodes are those of its graph."""

    # Whether roundings stored beside a float32 value stand behind a barrier.
    uses_barriers: bool = False
    barriers: Set[int] = frozenset()  # values whose rounding does
    # Values of `barriers` whose barrier is outside of a call with a derivative rule that returns
    # them: JAX drops the body of such a call when it differentiates.
    call_barriers: Set[int] = frozenset()
    # Nodes that read values of `barriers` from before the barrier.
    unbarriered: Set[Node] = frozenset()
    # Per sum or product of an activation and a parameter: see `decision.py`.
    cotangent_roundings: Mapping[int, CotangentRounding] = field(default_factory=dict)
    # Gathers of single numbers, and their transposes, to emit as comparisons.
    label_gathers: Set[Node] = frozenset()
    # Reversals that read a rounding of their operand besides, and to what.
    reversed_weights: Mapping[Node, Precision] = field(default_factory=dict)
    # Per jaxpr, the indices of equations that are emitted as one unit, which is recomputed in the
    # backward pass.
    units: Mapping[Frame, Groupings] = field(default_factory=dict)
    outline: Outline = field(default_factory=Outline)  # what makes these units
    # Values inside a group that are residuals, rather than recomputed.
    residuals: Set[int] = frozenset()
    # Values that a later group of the same jaxpr recomputes rather than reads.
    recomputed: Set[int] = frozenset()
    # Results of a derivative rule that the rule itself rounds and saves; see `regions.py`.
    relu_signs: Set[int] = frozenset()
    # Per jaxpr, the inputs that it computes itself rather than reads.
    rematerialized: Mapping[Frame, tuple[RematerializedInput, ...]] = field(default_factory=dict)
    lone: Set[Nest] = frozenset()  # checkpoints that need no barrier before what they recompute
