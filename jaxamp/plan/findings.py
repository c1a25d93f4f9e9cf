"""The results of all analyses of a program, from which a plan is assembled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from jaxamp.core.formats import Precision
from jaxamp.plan.conditioning.hazards import Hazards
from jaxamp.plan.dataflow.fused_groups import Groups
from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.dataflow.regions import FusionRegions
from jaxamp.plan.graph.graph import Frame, Graph, Node
from jaxamp.plan.precision.choose import Choice
from jaxamp.plan.precision.operand_reads import OperandReads
from jaxamp.policy.policy import PrecisionPolicy


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Findings:
    """Precisions of a program, and the analyses that they rest on.

    Attributes:
      policy: the policy.
      graph: the program.
      frame: its outermost jaxpr.
      provenance: where each value comes from.
      regions: which values are fused.
      hazards: numerical hazards of a narrow format.
      choices: what was chosen for each node.
      stored: precision in which each value is stored; `None` where a policy has no say.
      narrow: precision of stored activations, if it is narrow.
      exact_narrow: values that stay narrow inside a fused group; see `exact.py`.
      relu_signs: ReLU results whose sign alone is read; see `regions.py`.
      readings: how each reader gets its operands.
      groups: groups of equations that share a kernel; `None` if nothing is to be fused.
    """

    policy: PrecisionPolicy
    graph: Graph
    frame: Frame
    provenance: Provenance
    regions: FusionRegions
    hazards: Hazards
    choices: Mapping[Node, Choice]
    stored: Sequence[Precision | None]
    narrow: Precision | None
    exact_narrow: Set[int]
    relu_signs: Set[int]
    readings: OperandReads
    groups: Groups | None
