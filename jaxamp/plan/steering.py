"""Compiler hints for a program, beside its precisions, to fuse and store as planned.

They are plain data, computed from the findings by a package that knows the compiler (`xla/`); by
default there are none. No hint changes the precision of an equation or of a stored value.
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
      uses_barriers: whether roundings stored beside a float32 value stand behind a barrier.
      barriers: values whose rounding does.
      call_barriers: values of `barriers` whose barrier is outside of a call with a derivative rule
        that returns them: JAX drops the body of such a call when it differentiates.
      unbarriered: nodes that sum values of `barriers`, and read them before the barrier.
      cotangent_roundings: per sum of an activation and a parameter, the rounding of its cotangent.
      label_gathers: gathers of single numbers, and their transposes, to emit as comparisons.
      reversed_weights: reversals that read a rounding of their operand besides, and to what.
      outlines: whether equations that share a kernel are emitted as one unit, which is recomputed
        in the backward pass.
      residuals: values inside a group that are residuals, rather than recomputed.
      recomputed: values that a later group of the same jaxpr recomputes rather than reads.
      relu_signs: results of a derivative rule that the rule itself rounds and saves; see
        `regions.py`.
      rematerialized: per jaxpr, the inputs that it computes itself rather than reads.
    """

    uses_barriers: bool = False
    barriers: Set[int] = frozenset()
    call_barriers: Set[int] = frozenset()
    unbarriered: Set[Node] = frozenset()
    cotangent_roundings: Mapping[int, CotangentRounding] = field(default_factory=dict)
    label_gathers: Set[Node] = frozenset()
    reversed_weights: Mapping[Node, Precision] = field(default_factory=dict)
    outlines: bool = False
    residuals: Set[int] = frozenset()
    recomputed: Set[int] = frozenset()
    relu_signs: Set[int] = frozenset()
    rematerialized: Mapping[Frame, tuple[RematerializedInput, ...]] = field(default_factory=dict)


def unsteered(findings: Findings) -> Steering:
    """Leave everything but the precisions to the compiler."""
    return Steering()
