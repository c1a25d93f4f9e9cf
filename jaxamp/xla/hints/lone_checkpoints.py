"""Find checkpoints whose recomputation meets no forward pass that XLA could merge it with.

JAX puts a barrier before what the backward pass of a checkpoint recomputes. If the forward pass is
in another loop, or reads nothing of the same, that prevents nothing, and it costs: behind it XLA
stores a layer's slice of stacked weights in float32 before it rounds it.

See: ``prevent_cse`` of https://docs.jax.dev/en/latest/_autosummary/jax.checkpoint.html
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress

from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.graph.graph import Frame, Graph, Nest, nodes_of


def find_lone_checkpoints(graph: Graph, frame: Frame, *, in_loop: bool = False) -> Iterator[Nest]:
    """Yield them: in a loop that is differentiated as a whole, or with operands of their own.

    `in_loop` says whether the frame is inside of a loop, and of no checkpoint in that.
    """
    for site in frame.sites:
        if not isinstance(site, Nest):
            continue
        is_checkpoint = site.eqn.primitive.name == "remat2"
        if is_checkpoint and (
            _has_own_operands(graph, site) if site.eqn.params["differentiated"] else in_loop
        ):
            yield site
        is_inside = not is_checkpoint and (in_loop or site.op.trait is Trait.LOOP)
        for inner in site.frames:
            yield from find_lone_checkpoints(graph, inner, in_loop=is_inside)


def _has_own_operands(graph: Graph, nest: Nest) -> bool:
    """Return whether nothing else reads what the recomputation of a checkpoint reads."""
    inside = set(nodes_of(nest))
    is_read = jax_compat.read_by_recomputation(nest.eqn.params["jaxpr"])
    return all(
        value not in graph.outputs and inside.issuperset(graph.readers[value])
        for value in compress(nest.entries, is_read)
    )
