"""What a compiler is told beside the precisions, so that it fuses and stores as the plan supposes.

Plain data, which whoever knows the compiler makes of the findings; nothing in it is the default.
None of it changes in which precision an equation runs or what it makes is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from jaxamp.plan.decision import Echo, Remake
from jaxamp.plan.findings import Findings
from jaxamp.plan.graph.graph import Frame, Node


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Steering:
    """The steering of one program; values and nodes are those of its graph.

    Attributes:
      holds: whether roundings that are stored beside an f32 value stand behind a barrier.
      held: values whose rounding does.
      held_by_calls: of these, the results that a call with a derivative rule holds itself: JAX
        drops the body of such a call when it differentiates.
      unbarriered: nodes that sum held values, and read them before the barrier.
      cotangents: per sum of an activation and a parameter, how its cotangent is rounded.
      label_gathers: lookups of single numbers, and their transposes, to emit as comparisons.
      outlines: whether a group of equations that share a kernel is emitted as one unit, which is
        computed again in the backward pass.
      saved: values inside a group that the backward pass reads rather than computes again.
      recomputed: values that a later group of the same jaxpr computes again rather than reads.
      signs: results of a derivative rule that the rule itself rounds, and keeps: see relu_signs.py.
      constants: per jaxpr, the inputs that it makes itself rather than reads.
    """

    holds: bool = False
    held: Set[int] = frozenset()
    held_by_calls: Set[int] = frozenset()
    unbarriered: Set[Node] = frozenset()
    cotangents: Mapping[int, Echo] = field(default_factory=dict)
    label_gathers: Set[Node] = frozenset()
    outlines: bool = False
    saved: Set[int] = frozenset()
    recomputed: Set[int] = frozenset()
    signs: Set[int] = frozenset()
    constants: Mapping[Frame, tuple[Remake, ...]] = field(default_factory=dict)


def unsteered(findings: Findings) -> Steering:
    """Leave everything but the precisions to the compiler."""
    return Steering()
