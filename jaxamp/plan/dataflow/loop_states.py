"""Find the states of while loops: float carries that an iteration computes from themselves."""

from __future__ import annotations

from jaxamp.plan.graph.consumers import is_exact
from jaxamp.plan.graph.graph import Carry, Graph, Link, Role
from jaxamp.plan.graph.sweeps import union


def find_states(graph: Graph) -> list[Carry]:
    """Return the states of while loops that are in no other while loop.

    What a loop keeps beside its state and replaces, such as the value of an objective or whether to
    go on, is none; nor is what it only chooses from, such as the best value so far.
    """
    carries = [c for c in graph.carries if c.inner in graph.solving and graph.is_float32[c.inner]]
    if not carries:
        return []
    # One bit for each carry: whether a value may be that carry, and whether it is computed from it.
    same, made = [0] * len(graph.avals), [0] * len(graph.avals)
    for place, carry in enumerate(carries):
        same[carry.inner] = 1 << place
    for node in graph.nodes:
        if node.link is Link.BACK:
            continue
        chosen, computed = union(same, node.ins), union(made, node.ins)
        if not (is_exact(node) or node.role is Role.LINK):
            chosen, computed = 0, computed | chosen
        for out in node.outs:
            if graph.is_float32[out]:
                same[out] |= chosen
                made[out] |= computed
    return [carry for place, carry in enumerate(carries) if made[carry.out] >> place & 1]
