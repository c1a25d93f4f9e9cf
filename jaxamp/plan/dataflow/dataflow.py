"""The program, and what all later analyses read of it."""

from __future__ import annotations

from typing import NamedTuple

from jaxamp.plan.dataflow.provenance import Provenance
from jaxamp.plan.dataflow.regions import FusionRegions
from jaxamp.plan.dataflow.uses import Uses
from jaxamp.plan.graph.graph import Graph


class Dataflow(NamedTuple):
    """A program, and where its values come from, what they are used for, and which are fused."""

    graph: Graph
    provenance: Provenance
    uses: Uses
    regions: FusionRegions
