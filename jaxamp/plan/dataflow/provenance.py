"""Find where each value comes from: one forward sweep, repeated over loops."""

from __future__ import annotations

import math
from collections.abc import Collection

from jaxamp.core.formats import Precision
from jaxamp.core.intervals import magnitude
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.ranges import NEVER
from jaxamp.plan.graph.consumers import find_drawn, is_square
from jaxamp.plan.graph.graph import Graph, Link, Node, Role
from jaxamp.plan.graph.sweeps import column, forward, mark, union

STATE = 1  # computed from a boundary float by elementwise operations and movement alone
DENSE = 2  # computed by or from Compute without reducing axes: of an activation's size
STATISTIC = 4  # reduced from other values (a mean, a norm, a maximum), not dense
SOLVED = 8  # result of a matrix factorization, or of a solver that reads one
LAYER = 16  # a slice of a stacked boundary value in a loop: a layer's weights
WIDENED = 32  # an explicit cast from a narrower float
LARGE = 64  # may contain a constant, or power spectrum, that is infinite in the narrow format
TINY = 128  # depends on a constant that is zero in the narrow format


class Provenance:
    """Origins of all values, as flags.

    Attributes:
      bits: the flags of each value: `STATE`, `DENSE` and the others above.
      state: per value, 1 if it has the flag `STATE`; the columns that follow are alike.
      dense: `DENSE`.
      layer: `LAYER`.
    """

    def __init__(self, bits: bytearray) -> None:
        self.bits = bits
        self.state, self.dense = column(bits, STATE), column(bits, DENSE)
        self.layer = column(bits, LAYER)


def find_factors(graph: Graph) -> None:
    """Enter the results of factorizations and solves, except of samples, and but for `q` of `qr`.

    Orthogonal weights, initial ones or of a layer, are a factor and no solution. A triangle with a
    diagonal of ones that is no factor is a recurrence, `x[i] = b[i] - sum(a[i, :i] * x[:i])`, as of
    the delta rule in chunks: its terms may be rounded as those of any loop.
    """
    if not any(node.trait is Trait.LINALG for node in graph.nodes):
        return
    drawn, made = find_drawn(graph), set[int]()  # `made` of factors, without a product
    for node in graph.nodes:
        if node.trait is not Trait.LINALG:
            is_made = node.role is not Role.CONTRACT and not made.isdisjoint(node.ins)
            made.update(node.outs if is_made else ())
        elif not drawn.issuperset(node.ins):
            is_recurrence = node.eqn.params.get("unit_diagonal") and node.ins[0] not in made
            factors = () if is_recurrence else node.outs[node.name == "qr" :]
            made.update(factors)
            graph.factors.update(factors)


def find_provenance(graph: Graph, formats: Collection[Precision]) -> Provenance:
    """Sweep forward until nothing changes; more than once only where a loop feeds back.

    Known numbers beyond the narrow formats of a policy are large or tiny; large integers are not,
    as counters end at them.
    """
    bits = bytearray(len(graph.avals))
    largest = min((p.max for p in formats), default=math.inf)
    smallest = max((p.smallest_normal for p in formats), default=0.0)
    for value, number in graph.constants.items():
        is_large = largest < abs(number) < math.inf and graph.kinds[value] not in "iu"
        bits[value] = is_large * LARGE | (0 < abs(number) < smallest) * TINY
    for value in graph.sources:
        bits[value] |= graph.is_float32[value] * STATE
    for carry in graph.carries:
        if carry.keeps_dtype and graph.is_float32[carry.inner] and carry.inner not in graph.gated:
            bits[carry.inner] |= STATE
            bits[carry.result] |= STATE
    for value in graph.activations:
        bits[value] |= graph.is_float32[value] * DENSE
    mark(bits, graph.factors, SOLVED)
    if largest <= Precision.F16.max:
        mark(bits, _find_spectra(graph), LARGE)
    results = {c.inner: c.result for c in graph.carries if graph.is_float32[c.inner]}
    for node in forward(graph, bits):
        _TRANSFER[node.role](graph, bits, node)
        # What starts as state is never lowered, and ends as state.
        if node.link is Link.INIT and (result := results.get(node.outs[0])):
            bits[result] |= bits[node.outs[0]] & STATE
    return Provenance(bits)


def _find_spectra(graph: Graph) -> frozenset[int]:
    """Return power spectra: of 1,000 samples of a signal up to one they are up to 250,000."""
    waves = {
        v
        for node in (graph.nodes if "fft" in graph.named else ())
        if node.role is Role.ELEMENTWISE and "c" in [graph.kinds[i] for i in node.ins]
        for v in node.outs
    }
    powers = (n for n in graph.nodes if waves and is_square(n) and graph.origin(n.ins[0]) in waves)
    return frozenset(node.outs[0] for node in powers)


def _contract(graph: Graph, bits: bytearray, node: Node) -> None:
    assert node.op is not None  # a contraction is in the table
    large = union(bits, node.op.multiplied(node.ins)) & LARGE
    for out in node.outs:
        bits[out] |= large | (graph.is_float32[out] and out not in graph.written) * DENSE


def _reduce(graph: Graph, bits: bytearray, node: Node) -> None:
    arriving = union(bits, node.ins)
    paired = len(node.ins) == len(node.outs)
    for source, out in node.moves:
        reduced = bits[source] if paired else arriving
        same_axes = graph.avals[out].ndim == graph.avals[source].ndim
        keeps_axes = same_axes or node.trait is Trait.ALLREDUCE
        found = bits[out] & ~(DENSE | STATISTIC) | arriving & (LARGE | TINY | SOLVED)
        if not keeps_axes:
            found |= STATISTIC
        elif graph.is_float32[out]:
            found |= reduced & DENSE
        bits[out] = found * (graph.kinds[out] == graph.kinds[source])  # an index is not large


def _elementwise(graph: Graph, bits: bytearray, node: Node) -> None:
    (out,) = node.outs
    arriving = union(bits, node.ins)
    found = bits[out] & (STATE | DENSE | SOLVED | LARGE) | arriving & DENSE
    # A solution to which an activation is added is one, as in a network's residual stream.
    if arriving & SOLVED and not any(bits[i] & (DENSE | SOLVED) == DENSE for i in node.ins):
        found |= SOLVED
    if arriving & STATE and _is_state(graph, bits, node):
        found |= STATE
    if arriving & STATISTIC and not found & DENSE:
        found |= STATISTIC
    if arriving & (LARGE | TINY) and graph.kinds[out] != "b":  # a comparison is no number
        found |= _grows_large(graph, bits, node) * LARGE | _rests_on_tiny(bits, node) * TINY
    bits[out] = found


def _is_state(graph: Graph, bits: bytearray, node: Node) -> bool:
    """Return whether an operand of the result's own size is state."""
    size = graph.sizes[node.outs[0]]
    return any(bits[i] & STATE and graph.sizes[i] == size for i in node.ins)


# Only these pass a huge operand on: others are bounded, and its `exp` is 0, or inf in f32 too.
_UNBOUNDED_CURVES = frozenset(
    {"pow", "integer_pow", "square", "sqrt", "sinh", "cosh", "cbrt", "lgamma", "tan", "rem"}
    | {"polynomial", "one_minus_square"}
)


def _grows_large(graph: Graph, bits: bytearray, node: Node) -> bool:
    name = node.name
    if name == "div":
        # Only a tiny constant itself counts: `1 / (variance + epsilon)` is as large as the data.
        by_tiny = bits[node.ins[1]] & TINY and node.ins[1] in graph.constants
        return bool(bits[node.ins[0]] & LARGE or by_tiny)
    squashes = node.trait in (Trait.SMOOTH, Trait.SENSITIVE) and name not in _UNBOUNDED_CURVES
    is_bounded = magnitude(graph.ranges[node.outs[0]]).high <= Precision.F16.max
    if squashes or is_bounded:
        return False
    # The largest number of float32 bounds none, and replaces infinities, which are rare.
    is_rare = name == "select_n" and graph.ranges[node.ins[0]] == NEVER
    limit = Precision.F32.max if is_rare or name in ("max", "min", "clamp") else math.inf
    read = (v for v in node.ins if abs(graph.constants.get(v, 0.0)) < limit)
    return bool(union(bits, read) & LARGE)


def _rests_on_tiny(bits: bytearray, node: Node) -> bool:
    if not union(bits, node.ins) & TINY:
        return False
    # A product or quotient with an activation has the activation's magnitude again.
    scales = node.name in ("mul", "div")
    return not (scales and any(bits[i] & (DENSE | TINY) == DENSE for i in node.ins))


def _move(graph: Graph, bits: bytearray, node: Node) -> None:
    indices = [i for i in node.ins[1:] if graph.kinds[i] in "iu"]
    is_gather = not graph.constants.keys() >= {*indices}
    for source, out in node.moves:
        # An update passes on whole parameters, neither broadcasts nor slices of them.
        same = not is_gather and graph.sizes[source] == graph.sizes[out]
        bits[out] = bits[source] if same else bits[source] & ~STATE


def _merge(graph: Graph, bits: bytearray, node: Node) -> None:
    (out,) = node.outs
    bits[out] |= union(bits, node.ins) & (STATE | DENSE | SOLVED | LARGE)


def _convert(graph: Graph, bits: bytearray, node: Node) -> None:
    (source,), (out,) = node.ins, node.outs
    dtype = graph.avals[source].dtype
    # ml_dtypes' formats have kind "V" to numpy.
    if graph.is_float32[out] and dtype.itemsize < 4 and dtype.kind in "fV":
        bits[out] |= WIDENED


def _fixed(graph: Graph, bits: bytearray, node: Node) -> None:
    if node.trait is Trait.SOLVER and union(bits, node.ins) & SOLVED:
        mark(bits, node.outs, SOLVED)


def _link(graph: Graph, bits: bytearray, node: Node) -> None:
    (out,) = node.outs
    given = union(bits, node.ins)
    if node.link is Link.INIT and out in graph.gated:
        given &= ~STATE  # what begins it is a parameter no more than what follows
    found = bits[out] | given & ~(LAYER | WIDENED)
    # A loop that gathers its layer's weights passes them stacked to that of the backward pass.
    if node.link is Link.STACK:
        found |= given & LAYER
    elif node.link is Link.SLICE and given & (STATE | LAYER):
        found |= LAYER
    bits[out] = found


_TRANSFER = {
    Role.CONTRACT: _contract,
    Role.REDUCE: _reduce,
    Role.ELEMENTWISE: _elementwise,
    Role.MOVE: _move,
    Role.MERGE: _merge,
    Role.CONVERT: _convert,
    Role.FIXED: _fixed,
    Role.LINK: _link,
}
