"""Find what the user has decided: kept regions and override rules, per node."""

from __future__ import annotations

from dataclasses import dataclass

from jaxamp.core.formats import Precision
from jaxamp.core.keep_precision import kept_precision
from jaxamp.jaxprs.name_stack import clean_scope, functions_around
from jaxamp.plan.graph.graph import Graph, Node, Role
from jaxamp.policy.policy import PrecisionPolicy
from jaxamp.policy.rules import EquationView, first_match

UNFORCED: tuple[None, str] = None, ""


@dataclass(slots=True, eq=False)
class Forced:
    """Precision and reason of the nodes that the user has decided."""

    by_node: dict[Node, tuple[Precision, str]]
    rule_counts: tuple[int, ...]

    def of(self, node: Node) -> tuple[Precision | None, str]:
        """Return the precision that a node is forced to, `None` if it is not, and by what."""
        return self.by_node.get(node, UNFORCED)


def find_forced(graph: Graph, policy: PrecisionPolicy) -> Forced:
    """Match every equation that has a precision against the kept regions, then the rules."""
    by_node: dict[Node, tuple[Precision, str]] = {}
    counts = [0] * len(policy.rules)
    kept = {scope: kept_precision(scope) for scope in {n.scope for n in graph.nodes}}
    for node in graph.nodes if policy.rules or any(kept.values()) else ():
        if node.role is Role.LINK or node.eqn is None:
            continue
        if (region := kept[node.scope]) is not None:
            by_node[node] = region, f"kept in {region.short} by the program"
        elif policy.rules and (index := first_match(policy.rules, _view(graph, node))) is not None:
            counts[index] += 1
            by_node[node] = policy.rules[index].precision, f"rule: {policy.rules[index]}"
    return Forced(by_node, tuple(counts))


def _view(graph: Graph, node: Node) -> EquationView:
    eqn = node.eqn
    assert eqn is not None
    outs, ins = ([graph.avals[v] for v in values] for values in (node.outs, node.ins))
    return EquationView(
        primitive=eqn.primitive.name,
        kind=node.kind,
        scope=clean_scope(node.scope),
        shapes=tuple(getattr(a, "shape", ()) for a in outs),
        dtypes=tuple(getattr(a, "dtype", None) for a in outs),
        in_shapes=tuple(getattr(a, "shape", ()) for a in ins),
        in_dtypes=tuple(getattr(a, "dtype", None) for a in ins),
        functions=lambda: functions_around(node.scope, eqn),
    )
