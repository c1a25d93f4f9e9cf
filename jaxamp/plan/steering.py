"""Hints for a compiler, beside the precisions, that make it fuse and store as planned.

Plain data, which whoever knows the compiler computes from the findings; the default is no hint.
None of it changes the precision of an equation or of a stored value.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from jaxamp.core.formats import Precision
from jaxamp.plan.decision import CotangentRounding, RematerializedInput
from jaxamp.plan.findings import Findings
from jaxamp.plan.graph.graph import Frame, Node


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Steering:
    """Compiler hints for one program; values and nodes are those of its graph.

    Attributes:
      holds: whether roundings stored beside a float32 value stand behind a barrier.
      held: values whose rounding does.
      held_by_calls: of these, results that a call with a derivative rule holds itself, as JAX drops
        the body of such a call when it differentiates.
      unbarriered: nodes that sum held values, and read them before the barrier.
      cotangents: per sum of an activation and a parameter, how its cotangent is rounded.
      label_gathers: gathers of single numbers, and their transposes, to emit as comparisons.
      reversed_weights: reversals that read a rounding of their operand besides, and to what.
      outlines: whether equations that share a kernel are emitted as one unit, which is recomputed
        in the backward pass.
      saved: values inside a group that are residuals, rather than recomputed.
      recomputed: values that a later group of the same jaxpr recomputes rather than reads.
      signs: results of a derivative rule that the rule itself rounds and saves; see
        `relu_signs.py`.
      constants: per jaxpr, the inputs that it computes itself rather than reads.
    """

    holds: bool = False
    held: Set[int] = frozenset()
    held_by_calls: Set[int] = frozenset()
    unbarriered: Set[Node] = frozenset()
    cotangents: Mapping[int, CotangentRounding] = field(default_factory=dict)
    label_gathers: Set[Node] = frozenset()
    reversed_weights: Mapping[Node, Precision] = field(default_factory=dict)
    outlines: bool = False
    saved: Set[int] = frozenset()
    recomputed: Set[int] = frozenset()
    signs: Set[int] = frozenset()
    constants: Mapping[Frame, tuple[RematerializedInput, ...]] = field(default_factory=dict)


def unsteered(findings: Findings) -> Steering:
    """Leave everything but the precisions to the compiler."""
    return Steering()
