"""Add results of quantized dots in bfloat16, where each of them is read for the sum alone.

The cotangent of what several products read, as queries, keys and values or the two halves of a
gated MLP do, is a sum of products. Its terms are stored in bfloat16. Added in float32 by whoever
reads the sum, each reader reads all terms. Added in bfloat16 as they are, the sum is one array:
XLA:GPU has the second product add to the first in float32, and round once.

See: ``python -m benchmarks.fp8_step --target h200``, JAX 0.10.2.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxamp.core.formats import Precision
from jaxamp.plan.conditioning.hazards import Hazards
from jaxamp.plan.dataflow.regions import FusionRegions
from jaxamp.plan.dataflow.uses import find_returned
from jaxamp.plan.graph.graph import Graph, Node
from jaxamp.plan.precision.choose import Choice
from jaxamp.plan.precision.overrides import Forced

BF16 = Precision.BF16

_ADDED = Choice(BF16, BF16, "bf16, as its terms are: one product adds to the other's result")
_SUMS = ("add", "add_any")


def add_narrow(
    graph: Graph,
    hazards: Hazards,
    regions: FusionRegions,
    forced: Forced,
    stored: list[Precision | None],
    choices: Mapping[Node, Choice],
) -> dict[Node, Choice]:
    """Return choices for sums of results of quantized dots.

    Args:
      graph: the program.
      hazards: what loses accuracy in a narrow format.
      regions: which values are fused; sums that are stored are taken out.
      forced: what the user has decided.
      stored: precision in which each value is stored; entries of sums are updated.
      choices: what was chosen for each node, quantization included; left as it is.
    """
    scaled = {v for n, choice in choices.items() if choice.scaled for v in n.outs}
    terms = {v for v in scaled if _is_term(graph, stored, v)}
    if not terms:
        return {}
    returned = find_returned(graph)
    found: dict[Node, Choice] = {}
    for node in graph.nodes:
        if node.name not in _SUMS or not terms.issuperset(node.ins) or forced.of(node)[0]:
            continue
        if not returned.isdisjoint(node.outs) or hazards.of(node, list(node.outs), BF16):
            continue
        found[node] = _ADDED
        for value in node.outs:
            stored[value], regions.fused[value] = BF16, 0
            if _is_term(graph, stored, value):
                terms.add(value)
    return found


def _is_term(graph: Graph, stored: list[Precision | None], value: int) -> bool:
    return stored[value] is BF16 and len(graph.readers[value]) == 1
