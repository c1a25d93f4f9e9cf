"""Store results of quantized dots narrow, though no later dot reads them.

Where a dot rounds its operands to 16 bits, a result that only float32 arithmetic reads stays in
float32: a gradient, say, that an optimizer reads. Where it rounds them to 8 bits and fewer, each
operand is off by up to a sixteenth, beside which one more rounding, to 8 bits of mantissa, counts
for nothing, and the result is written and read in half of the bytes.

Results that cancel later, as in distances, stay in float32: rounding is relative to the whole sum,
while errors of operands average out in it. So do those that leave the program as they are, or go
around a loop, which a kernel would only widen.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxamp.core.formats import Precision
from jaxamp.core.guards import Guard
from jaxamp.plan.conditioning.hazards import Hazards
from jaxamp.plan.dataflow.uses import find_returned
from jaxamp.plan.graph.graph import Graph, Link, Node, Role
from jaxamp.plan.precision.choose import Choice
from jaxamp.plan.precision.reader_precisions import forwarded

_STACKED = (Link.STACK,)  # a loop's results are computed from in whole, as one iteration's are


def narrow_quantized(
    graph: Graph,
    hazards: Hazards,
    stored: list[Precision | None],
    choices: Mapping[Node, Choice],
) -> dict[Node, Choice]:
    """Return choices for quantized dots whose results were float32 for lack of gain alone.

    Args:
      graph: the program.
      hazards: what loses accuracy in a narrow format.
      stored: precision in which each value is stored; entries of what is narrowed are updated.
      choices: what was chosen for each node, quantization included; left as it is.
    """
    wide = [n for n in graph.nodes if n.role is Role.CONTRACT and _is_wide(choices[n])]
    if not wide:
        return {}
    returned = find_returned(graph)
    cancelling = hazards.squared_distances | hazards.lookup_places
    found: dict[Node, Choice] = {}
    for node in wide:
        low = choices[node].operand
        copies = _copies(graph, choices, node.outs[0])
        if low is not Precision.BF16 or copies is None:
            continue  # a gradient may overflow float16
        if not (returned.isdisjoint(copies) and cancelling.isdisjoint((*node.ins, *copies))):
            continue
        for value in copies:
            stored[value] = low
        reason = f"{choices[node].reason}; result in {low.short}, as its operands are coarser"
        found[node] = choices[node]._replace(stored=low, reason=reason)
    return found


def _is_wide(choice: Choice) -> bool:
    is_gainless = choice.stored is Precision.F32 and choice.guard is Guard.NO_GAIN
    return choice.scaled is not None and is_gainless


def _copies(graph: Graph, choices: Mapping[Node, Choice], value: int) -> set[int] | None:
    """Return a value and what it is moved or stacked to; `None` if it crosses a loop or branch."""
    copies, pending = {value}, [value]
    for source in pending:
        for reader in graph.readers[source]:
            moved = [out for v, out in forwarded(reader, choices, _STACKED) if v == source]
            if reader.role is Role.LINK and not moved:
                return None
            pending += [out for out in moved if out not in copies]
            copies.update(moved)
    return copies
