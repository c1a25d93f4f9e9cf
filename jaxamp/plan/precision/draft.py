"""The precisions of a program so far, for passes that change the first choice of some nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jaxamp.core.formats import Precision
from jaxamp.plan.conditioning.hazards import Hazards
from jaxamp.plan.dataflow.dataflow import Dataflow
from jaxamp.plan.graph.graph import Graph, Node
from jaxamp.plan.precision.choose import Choice
from jaxamp.plan.precision.overrides import Forced
from jaxamp.policy.policy import PrecisionPolicy


class Draft(NamedTuple):
    """Precisions of a program so far, of which a pass makes new choices for some nodes.

    Attributes:
      policy: the policy.
      graph: the program.
      flow: where values come from, what they are for, and which are fused.
      hazards: what loses accuracy in a narrow format.
      forced: what the user has decided.
      stored: precision in which each value is stored; a pass updates it.
      choices: what was chosen for each node; a pass leaves it as it is.
    """

    policy: PrecisionPolicy
    graph: Graph
    flow: Dataflow
    hazards: Hazards
    forced: Forced
    stored: list[Precision | None]
    choices: Mapping[Node, Choice]
