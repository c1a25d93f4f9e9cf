"""Find weights that are rounded before they are reversed.

XLA:GPU recognizes the gradient of a convolution with respect to its input by the reversed weights,
but only if nothing, such as a rounding, stands between the reversal and the convolution.

See: ``MatchBackwardInput`` in ``xla/service/gpu/transforms/conv_rewriter.cc``; what it is worth:
``python -m benchmarks.techniques --target h200 --model resnet50 --only all reversed-weights``.
"""

from __future__ import annotations

from jaxamp.core.formats import Precision, is_narrow
from jaxamp.plan.findings import Findings
from jaxamp.plan.graph.graph import Node, Role


def find_reversed_weights(findings: Findings) -> dict[Node, Precision]:
    """Return reversals whose float32 operand is also read rounded, and to what."""
    low = findings.policy.base
    if not is_narrow(low):
        return {}
    return {node: low for node in findings.graph.named.get("rev", ()) if _is_weight(findings, node)}


def _is_weight(findings: Findings, node: Node) -> bool:
    (out,) = node.outs
    is_wide = findings.readings.own_cast[out] and findings.stored[out] is Precision.F32
    readers = findings.graph.readers[out]
    return bool(is_wide) and any(reader.role is Role.CONTRACT for reader in readers)
