"""Cast activations before their manual axes vary, so that their cotangents are added up narrow.

Under `shard_map` such a cast of axes sends nothing, but its transpose adds up cotangents over
devices. Where every reader rounds an activation, it is rounded before: what comes back is then
added up as each device stores it, as activations themselves are, and as XLA does in a program that
it partitions. A cotangent of a parameter is a gradient: it is summed in the policy's `allreduce`.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxamp.core.formats import Precision
from jaxamp.core.guards import Guard
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.dataflow import Dataflow
from jaxamp.plan.dataflow.lookups import find_looked_up
from jaxamp.plan.graph.graph import Node
from jaxamp.plan.precision.choose import Choice
from jaxamp.plan.precision.reader_precisions import ReaderPrecisions, forwarded
from jaxamp.policy.policy import PrecisionPolicy

F32 = Precision.F32


def narrow_varying(
    flow: Dataflow,
    policy: PrecisionPolicy,
    stored: list[Precision | None],
    choices: Mapping[Node, Choice],
) -> dict[Node, Choice]:
    """Return choices for casts of axes of activations that all their readers round.

    Args:
      flow: the program, and what is known of it.
      policy: the policy.
      stored: precision in which each value is stored; entries of what is cast are updated.
      choices: what was chosen for each node; left as it is.
    """
    graph, provenance, uses, _ = flow
    varying = [n for n in graph.nodes if n.trait is Trait.VARY and choices[n].operand is None]
    if not varying:
        return {}
    looked_up = find_looked_up(graph, provenance)
    sources = ((node, node.ins[0]) for node in varying)
    activations = [
        node
        for node, source in sources
        if stored[source] is F32 and (provenance.dense[source] or source in looked_up)
    ]
    wanted = ReaderPrecisions(graph, uses, stored, choices, ())
    found: dict[Node, Choice] = {}
    for node in activations:
        low = wanted[node.outs[0]]
        if low is F32 or (Guard.RANGE in policy.guards and low is Precision.F16):
            continue  # a sum in float16 may overflow
        reason = f"{low.short} before it varies: cotangents are added up over devices as stored"
        found[node] = Choice(low, low, reason)
        pending = [node.outs[0]]
        for value in pending:
            stored[value] = low
            for reader in graph.readers[value]:
                moved = forwarded(reader, choices, ())
                pending += [out for source, out in moved if source == value]
    return found
