"""Store results of quantized dots narrow, and evaluate logistics before them so.

Where a dot rounds its operands to 16 bits, a result that only float32 arithmetic reads stays in
float32: a gradient, say, that an optimizer reads. Where it rounds them to 8 bits and fewer, each
operand is off by up to a sixteenth, beside which one more rounding, to 8 bits of mantissa, counts
for nothing, and the result is written and read in half of the bytes.

Results that cancel later, as in distances, stay in float32: rounding is relative to the whole sum,
while errors of operands average out in it. So do those that leave the program as they are, or go
around a loop, which a kernel would only widen.

The cotangent of what several products read, as queries, keys and values or the two halves of a
gated MLP do, is a sum of such results. Added in float32 by whoever reads the sum, each reader reads
all terms. Added in bfloat16 as they are, the sum is one array: XLA:GPU has the second product add
to the first in float32, and round once.

A logistic before quantized products is an exponential and a division: to XLA:GPU they are too
costly together to be computed for the maximum of what follows and again for its rounding to 8 bits.
It stores what follows, in float32. With the exponential in bfloat16 one kernel computes all.

An exponential that is off by a factor `1 + d` is the exact one of an argument that is off by
`log(1 + d)`, which is less than 2**-8. So is each function of the logistic, `1 - y` and its
derivative `y * (1 - y)` among them: none of them cancels. The argument is a number of bfloat16, and
what follows is rounded to three bits of mantissa or two.

See: ``python -m benchmarks.fp8_step --target h200``, JAX 0.10.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from jaxamp.core.formats import Precision
from jaxamp.core.guards import Guard
from jaxamp.plan.dataflow.regions import ARITHMETIC
from jaxamp.plan.dataflow.uses import Uses, find_returned
from jaxamp.plan.findings import Draft
from jaxamp.plan.graph.graph import Graph, Link, Node, Role
from jaxamp.plan.precision.choose import Choice
from jaxamp.plan.precision.reader_precisions import forwarded

BF16, F32 = Precision.BF16, Precision.F32

_ADDED = Choice(BF16, BF16, "bf16, as its terms are: one product adds to the other's result")
_SUMS = ("add", "add_any")
_STACKED = (Link.STACK,)  # a loop's results are computed from in whole, as one iteration's are


def narrow_quantized(draft: Draft) -> dict[Node, Choice]:
    """Return choices for results of quantized dots, and for sums of them, that are narrowed.

    Sums that are stored are taken out of the fused values.
    """
    graph, stored, choices = draft.flow.graph, draft.stored, draft.choices
    dots = [n for n in graph.nodes if n.role is Role.CONTRACT and choices[n].form]
    if not dots:
        return {}
    returned = find_returned(graph)
    found = _narrow_results(draft, returned, dots)
    terms = {v for n in dots for v in n.outs if _is_term(graph, stored, v)}
    for node in graph.nodes if terms else ():
        if node.name not in _SUMS or not terms.issuperset(node.ins) or draft.forced.of(node)[0]:
            continue
        if not returned.isdisjoint(node.outs) or draft.hazards.of(node, [*node.outs], BF16):
            continue
        found[node] = _ADDED
        for value in node.outs:
            stored[value], draft.flow.regions.fused[value] = BF16, 0
            if _is_term(graph, stored, value):
                terms.add(value)
    return found


def _narrow_results(draft: Draft, returned: Set[int], dots: list[Node]) -> dict[Node, Choice]:
    """Return choices for dots whose results were float32 for lack of gain alone."""
    graph, stored, choices = draft.flow.graph, draft.stored, draft.choices
    cancelling = graph.unrounded | draft.hazards.lookup_places
    found: dict[Node, Choice] = {}
    for node in dots:
        if choices[node].stored is not F32 or choices[node].guard is not Guard.NO_GAIN:
            continue
        low = choices[node].operand
        copies = _copies(graph, choices, node.outs[0])
        if low is not BF16 or copies is None:
            continue  # a gradient may overflow float16
        if not (returned.isdisjoint(copies) and cancelling.isdisjoint((*node.ins, *copies))):
            continue
        for value in copies:
            stored[value] = low
        reason = f"{choices[node].reason}; result in {low.short}, as its operands are coarser"
        found[node] = choices[node]._replace(stored=low, reason=reason)
    return found


def _is_term(graph: Graph, stored: list[Precision | None], value: int) -> bool:
    return stored[value] is BF16 and len(graph.readers[value]) == 1


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


def find_coarse_logistics(draft: Draft) -> dict[Node, Choice]:
    """Return choices for logistics whose exponential is evaluated in bfloat16."""
    graph, forced, stored, choices = draft.flow.graph, draft.forced, draft.stored, draft.choices
    logistics = [
        n
        for n in graph.named.get("logistic", ())
        if choices[n].operand is choices[n].stored is F32 and stored[n.ins[0]] is BF16
    ]
    if not logistics or not any(choice.form for choice in choices.values()):
        return {}
    quantized = _find_quantized(graph, draft.flow.uses, choices)
    reason = "exponential in bf16: only quantized products read what follows"
    return {
        node: choices[node]._replace(operand=BF16, accumulation=F32, reason=reason)
        for node in logistics
        if quantized[node.outs[0]] and forced.of(node)[0] is None
    }


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
