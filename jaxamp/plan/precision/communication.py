"""Find collectives whose payload can be low precision, because every reader casts it to that.

A device that gathers a parameter for its matrix products would round all of it on arrival. Rounding
the shards before they are sent gives the same numbers for half of the bytes.

On arrival the payload is nominally widened: each contraction rounds it again, which changes
nothing, and is differentiated by the wide value. So a device's part of the gradient is a float32
accumulator when it is sent back. A payload that is stored as it arrives, sliced by a loop or saved
by a checkpoint, stays narrow, and so does its part of the gradient.

Under automatic partitioning no equation says that it communicates. A sharding constraint may, and a
lookup does where its table is split by rows: each device finds its own rows, and all of them are
added up. One that finds more than the table holds is cheaper narrow on one device too.

Under `shard_map` a cast of manual axes sends nothing, but its transpose adds up cotangents over
devices. Where every reader rounds an activation, it is rounded before: what comes back is then
added up as each device stores it, as activations themselves are, and as XLA does in a program that
it partitions. A cotangent of a parameter is a gradient: it is summed in the policy's `allreduce`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.core.guards import Guard
from jaxamp.core.taxonomy import Trait
from jaxamp.plan.dataflow.dataflow import Dataflow
from jaxamp.plan.dataflow.lookups import find_looked_up, is_repeated_gather
from jaxamp.plan.graph.consumers import descendants
from jaxamp.plan.graph.graph import Frame, Graph, Link, Node, Role
from jaxamp.plan.precision.choose import Choice
from jaxamp.plan.precision.reader_precisions import ReaderPrecisions, forwarded, is_forwarded
from jaxamp.policy.policy import PrecisionPolicy

F32 = Precision.F32
_FORWARDING = (Link.INVARIANT, Link.SLICE, Link.STACK)
_MOVING = (Trait.COLLECTIVE, Trait.PLACEMENT)
_BUFFERED = (Link.SLICE, Link.STACK)  # links of values that are in memory as a whole
_SAVING_OPERANDS = ("remat2", "custom_vjp_call")  # their operands are residuals

_REPEATING = ("gather", "broadcast_in_dim")  # their operand has several cotangents


def find_communication(
    flow: Dataflow,
    frame: Frame,
    policy: PrecisionPolicy,
    stored: list[Precision | None],
    choices: Mapping[Node, Choice],
) -> dict[Node, Choice]:
    """Return choices for collectives that send float32 values in a narrow precision.

    Entries of stored payloads in `stored` are updated.
    """
    graph = flow.graph
    moves = (node for node in graph.nodes if node.role is Role.MOVE)
    senders = {node for node in moves if _sends(graph, policy, node)}
    if not senders:
        return {}
    wanted = ReaderPrecisions(graph, flow.uses, stored, choices, _FORWARDING)
    saved = set(_saved(frame))
    found: dict[Node, Choice] = {}
    arrived: set[int] = set()
    for node in graph.nodes:
        for source, out in forwarded(node, choices, _FORWARDING):
            is_buffered = node.link is Link.STACK or stored[source] is not F32
            if node in senders and stored[source] is F32 and wanted[out] is not F32:
                reason = f"sent in {wanted[out].short}: every reader casts it to that"
                found[node] = Choice(F32, wanted[out], reason, None, wanted[out])
                is_buffered = _is_buffered(graph, choices, saved, out)
            elif source not in arrived:
                continue
            arrived.add(out)
            if is_buffered and _is_read_once(graph, choices, out):
                stored[out] = wanted[out]
    return found


def _sends(graph: Graph, policy: PrecisionPolicy, node: Node) -> bool:
    """Return whether a node moves an array between devices, or may be partitioned so that it does.

    A cast of a variable's varying manual axes sends nothing, but its transpose is an all-reduce.
    """
    if is_repeated_gather(graph, node):
        return True
    moves = node.trait in _MOVING
    if policy.allreduce.bits < F32.bits:
        moves |= node.trait is Trait.VARY
    return moves and len(node.ins) == len(node.outs) == 1


def _saved(frame: Frame, policy: Any = None) -> Iterator[int]:
    """Yield values that a backward pass reads as saved; the policy is of a checkpoint around."""
    for site in frame.sites:
        if isinstance(site, Node):
            is_sent = site.trait is Trait.COLLECTIVE
            if policy is not None and is_sent and jax_compat.is_saved(policy, site.eqn):
                yield from site.outs
            continue
        name = site.eqn.primitive.name
        if name in _SAVING_OPERANDS:
            yield from site.entries
        for inner in site.frames:
            yield from _saved(inner, site.eqn.params["policy"] if name == "remat2" else policy)


def _is_buffered(graph: Graph, choices: Mapping[Node, Choice], saved: set[int], value: int) -> bool:
    """Return whether a payload, or what it is moved to, is in memory as it has arrived."""
    arrived = descendants(graph, value, lambda node: is_forwarded(node, choices, _FORWARDING))
    readers = (reader for v in arrived for reader in graph.readers[v])
    return not saved.isdisjoint(arrived) or any(r.link in _BUFFERED for r in readers)


def _is_read_once(graph: Graph, choices: Mapping[Node, Choice], value: int) -> bool:
    """Return whether a value has one cotangent; several are summed in float32."""
    readers = graph.readers[value]
    if len(readers) != 1 or readers[0].ins.count(value) != 1 or readers[0].name in _REPEATING:
        return False
    (reader,) = readers
    outs = [out for source, out in forwarded(reader, choices, _FORWARDING) if source == value]
    return reader.link is not Link.INVARIANT and all(
        _is_read_once(graph, choices, out) for out in outs
    )


def narrow_varying(
    flow: Dataflow,
    policy: PrecisionPolicy,
    stored: list[Precision | None],
    choices: Mapping[Node, Choice],
) -> dict[Node, Choice]:
    """Return choices for casts of axes of activations that all their readers round.

    Entries of what is cast in `stored` are updated.
    """
    graph, provenance, uses, _ = flow
    varying = [n for n in graph.nodes if n.trait is Trait.VARY and choices[n].operand is None]
    if not varying:
        return {}
    looked_up = find_looked_up(graph, provenance)
    sources = ((node, node.ins[0]) for node in varying)
    activations = [
        node
        for node, source in sources
        if stored[source] is F32 and (provenance.dense[source] or source in looked_up)
    ]
    wanted = ReaderPrecisions(graph, uses, stored, choices, ())
    found: dict[Node, Choice] = {}
    for node in activations:
        low = wanted[node.outs[0]]
        if low is F32 or (Guard.RANGE in policy.guards and low is Precision.F16):
            continue  # a sum in float16 may overflow
        reason = f"{low.short} before it varies: cotangents are added up over devices as stored"
        found[node] = Choice(low, low, reason)
        for value in descendants(graph, node.outs[0], lambda n: is_forwarded(n, choices, ())):
            stored[value] = low
    return found
