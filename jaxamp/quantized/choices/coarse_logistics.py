"""Evaluate a logistic's exponential in bfloat16 where only quantized products read what follows.

A logistic is an exponential and a division: to XLA:GPU they are too costly together to be computed
for the maximum of what follows and again for its rounding to 8 bits. It stores what follows, in
float32. With the exponential in bfloat16 one kernel computes all.

An exponential that is off by a factor `1 + d` is the exact one of an argument that is off by
`log(1 + d)`, which is less than 2**-8. So is each function of the logistic, `1 - y` and its
derivative `y * (1 - y)` among them: none of them cancels. The argument is a number of bfloat16, and
what follows is rounded to three bits of mantissa or two.

See: ``python -m benchmarks.fp8_step --target h200``, JAX 0.10.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxamp.core.formats import Precision
from jaxamp.plan.dataflow.regions import ARITHMETIC
from jaxamp.plan.dataflow.uses import Uses
from jaxamp.plan.graph.graph import Graph, Node
from jaxamp.plan.precision.choose import Choice
from jaxamp.plan.precision.draft import Draft

BF16, F32 = Precision.BF16, Precision.F32


def find_coarse_logistics(draft: Draft) -> dict[Node, Choice]:
    """Return choices for logistics whose exponential is evaluated in bfloat16."""
    graph, forced, stored, choices = draft.graph, draft.forced, draft.stored, draft.choices
    logistics = [n for n in graph.named.get("logistic", ()) if _is_wide(choices[n], stored, n)]
    if not logistics or not any(choice.form for choice in choices.values()):
        return {}
    quantized = _find_quantized(graph, draft.flow.uses, choices)
    reason = "exponential in bf16: only quantized products read what follows"
    return {
        node: choices[node]._replace(operand=BF16, accumulation=F32, reason=reason)
        for node in logistics
        if quantized[node.outs[0]] and forced.of(node)[0] is None
    }


def _is_wide(choice: Choice, stored: Sequence[Precision | None], node: Node) -> bool:
    is_wide = choice.operand is F32 and choice.stored is F32
    return is_wide and stored[node.ins[0]] is BF16


def _find_quantized(graph: Graph, uses: Uses, choices: Mapping[Node, Choice]) -> bytearray:
    """Mark values that nothing reads but quantized dots, and elementwise arithmetic before them."""
    found = bytearray(len(graph.avals))
    kept = graph.outputs | graph.onward

    def is_quantized(reader: Node) -> bool:
        if choices[reader].form:
            return True
        return reader.role in ARITHMETIC and all(found[v] for v in reader.outs)

    for node in reversed(graph.nodes):
        for value in node.outs:
            readers = [reader for reader in graph.readers[value] if uses.needs(reader)]
            found[value] = value not in kept and bool(readers) and all(map(is_quantized, readers))
    return found
