"""Find products that repeat one that decides when a loop stops, as the derivative of a solver does.

A loop that is differentiated makes its steps again, a checkpoint later or in a rule of its own, and
then only counts them. A step that was accepted has to be accepted, and to be as long as it was.
"""

from __future__ import annotations

from collections.abc import Hashable

from jax.extend.core import JaxprEqn

from jaxamp.jaxprs.name_stack import is_transposed
from jaxamp.plan.dataflow.uses import Uses
from jaxamp.plan.graph.graph import Graph, Role


def shape_of(eqn: JaxprEqn) -> Hashable:
    """Return what a product and its repetition share, and its transpose rarely does.

    JAX gives what the rules of a `custom_vjp` compute the line of its call.
    """
    return *(str(v.aval) for v in eqn.invars), str(eqn.params.get("dimension_numbers"))


def find_repeated(graph: Graph, uses: Uses) -> frozenset[int]:
    """Return the results of products of a backward pass that repeat a deciding one."""
    products = [node for node in graph.products if node.role is Role.CONTRACT]
    stopping = (n for n in products if any(uses.stops_loop[v] for v in n.outs))
    deciding = graph.deciding.union(shape_of(node.eqn) for node in stopping)
    return frozenset(
        out
        for node in products
        if deciding and (graph.deciding or is_transposed(node.scope))
        if shape_of(node.eqn) in deciding
        for out in node.outs
    )
