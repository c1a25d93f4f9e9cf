"""Cost of a plan: modelled time of its operations, from their FLOPs and bytes."""

from __future__ import annotations

from jaxamp.compiled.targets import TARGETS
from jaxamp.inspect.operation import Operation
from jaxamp.inspect.walk import Walk
from jaxamp.plan import Plan

_TARGET = TARGETS["h200"]


def cost_of(plan: Plan) -> float:
    """Sum the seconds of all operations, each as a kernel of its own at the published rates."""
    return sum(op.runs * _seconds(op) for op in Walk(plan).operations)


def _seconds(op: Operation) -> float:
    rate = _TARGET.rates.get(op.arithmetic, _TARGET.rates["f32"])
    multiplying = op.each.flops / rate if op.contraction else 0.0
    return max(multiplying, op.each.bytes / _TARGET.bandwidth)
