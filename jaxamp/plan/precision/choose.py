"""Choose the precision of each node: the policy's table first, then the guards.

`Chooser.choose_all` visits the nodes in program order, and tracks in which precision every value is
stored.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from jax.extend.core import Literal

from jaxamp.core.features import Form
from jaxamp.core.formats import Precision
from jaxamp.core.guards import Guard
from jaxamp.core.taxonomy import OpKind, Trait
from jaxamp.jaxprs.contracted import EXPLICIT_PRECISION, has_explicit_precision
from jaxamp.plan.conditioning.hazards import LOOKUP_PLACE, PRECISE, Hazards
from jaxamp.plan.conditioning.rescaled_products import find_rescaled_products
from jaxamp.plan.dataflow.constraints import (
    READS_SOLUTION,
    Constraint,
    constrain_contraction,
    misstated,
    precise,
)
from jaxamp.plan.dataflow.dataflow import Dataflow
from jaxamp.plan.dataflow.exact import fits, narrow_values
from jaxamp.plan.dataflow.lookups import (
    find_masked_lookups,
    find_split_lookups,
    find_sums_of_cotangents,
    is_label_gather,
    is_subtracted,
)
from jaxamp.plan.dataflow.product_sizes import find_product_sizes, is_small_beside_products
from jaxamp.plan.dataflow.provenance import DENSE, TINY
from jaxamp.plan.dataflow.regions import (
    COSTLY,
    EQUALITIES,
    find_relu_signs,
    find_relu_tangents,
    is_pooling_gradient,
)
from jaxamp.plan.dataflow.shift_invariant_logits import (
    find_compared,
    is_shift_invariant,
    outweighs_operands,
)
from jaxamp.plan.dataflow.uses import REACHES, find_returned, is_state_update
from jaxamp.plan.graph.consumers import find_drawn
from jaxamp.plan.graph.graph import Link, Node, Role
from jaxamp.plan.graph.sweeps import union
from jaxamp.plan.precision.overrides import UNFORCED, Forced
from jaxamp.policy.policy import PrecisionPolicy

F32 = Precision.F32


class Choice(NamedTuple):
    """Precision of a node's arithmetic and of its results, and why."""

    operand: Precision | None  # None: operands are read as they are stored
    stored: Precision
    reason: str
    guard: Guard | None = None
    accumulation: Precision | None = None
    form: Form | None = None  # what a feature has emitted in place of the primitive


def narrow_kinds(policy: PrecisionPolicy) -> dict[OpKind, Precision | None]:
    """Return the precision that a policy gives each kind, where it is narrower than float32."""
    precisions = {kind: policy.precision_for(kind) for kind in OpKind}
    precisions[OpKind.COMPUTE] = policy.base
    return {k: p if p.bits < F32.bits else None for k, p in precisions.items()}


class Chooser:
    """Chooser of precisions, node by node."""

    def __init__(self, flow: Dataflow, hazards: Hazards, policy: PrecisionPolicy) -> None:
        self.graph, self.provenance, self.uses, self.regions = flow
        graph, provenance, _, regions = flow
        self.hazards = hazards
        self.policy, self.guards = policy, policy.guards
        self.narrow = narrow_kinds(policy)
        carries = (c for c in graph.carries if not c.keeps_dtype)
        self.narrow_carries = {v for c in carries for v in (c.inner, c.result)}
        # What goes into a float32 carry, and so is in memory in float32.
        links = [n for n in graph.named.get("", ()) if n.link in _CARRIED]
        self.carried_wide = {n.ins[0] for n in links if n.outs[0] not in self.narrow_carries}
        self.copies: dict[int, Precision] = {}  # per fused value, what far readers copy it to
        self.gainless: set[int] = set()  # f32 for lack of gain, not for accuracy
        self.returned = find_returned(graph) if Guard.NO_GAIN in policy.guards else frozenset()
        self.product_sizes = find_product_sizes(graph, provenance)
        self.masked_rows = find_masked_lookups(graph, provenance)
        self.split_lookups = find_split_lookups(
            graph, provenance, if_unknown=policy.allreduce.bits < F32.bits
        )
        may_overflow = self._may_overflow(self.narrow[OpKind.COMPUTE])
        self.rescaled = (
            find_rescaled_products(graph, self.uses) if may_overflow else frozenset[int]()
        )
        self.many_cotangents, self.few_cotangents = find_sums_of_cotangents(graph)
        self.relu_signs = find_relu_signs(graph, regions)
        self.relu_tangents = find_relu_tangents(graph, self.relu_signs)
        self.solutions: set[int] = set()  # results of products with those of factorizations
        self.exact_narrow: set[int] = set()  # narrow inside a fused region: see exact.py
        self._made: dict[Choice, Choice] = {}  # equal choices are one object
        self.stored: list[Precision | None] = [
            F32 if is_f32 else None for is_f32 in graph.is_float32
        ]

    def _may_overflow(self, low: Precision | None) -> bool:
        """Return whether a sum or a product may overflow a narrow format, and is kept from it."""
        return Guard.RANGE in self.guards and low is Precision.F16

    def choose_all(
        self, entries: Sequence[int], inputs: Sequence[Precision | None], forced: Forced
    ) -> dict[Node, Choice]:
        """Return the choices for all nodes."""
        for value, precision in zip(entries, inputs, strict=False):
            if precision is not None:
                self.stored[value] = precision
        of = forced.by_node
        return {n: self.choose(n, *of.get(n, UNFORCED)) for n in self.graph.nodes}

    def choose(self, node: Node, forced: Precision | None, forced_by: str) -> Choice:
        """Return the choice for one node; `forced` comes from a rule or a kept region."""
        if node.role is Role.LINK:
            return self._link(node)
        choice = self._choose(node, forced, forced_by)
        if node.name in _BLANK:
            self.gainless.update(node.outs)
        for value in node.outs:
            if self.graph.is_float32[value]:
                self.stored[value] = choice.stored
        if node.role is Role.MOVE and choice.operand is None:
            self._follow(node)
        return self._made.setdefault(choice, choice)

    def _choose(self, node: Node, forced: Precision | None, forced_by: str) -> Choice:
        if node.role is Role.FIXED:
            return Choice(F32, F32, *_FIXED_REASONS.get(node.trait, _KEPT))
        if node.role is Role.CONVERT:
            return Choice(None, F32, "an explicit cast of the program")
        if forced is not None and forced.bits <= 8:  # a rule for dots
            forced = self.policy.base if node.role is Role.CONTRACT else None
        if forced is not None:
            return self._forced(node, forced, forced_by)
        low = self.narrow[node.kind]
        if low is None:
            return Choice(F32, F32, f"{_IN_WORDS[node.kind]} are f32 in the policy", None, F32)
        if not self.guards:
            return self._unguarded(node, low)
        return _BY_ROLE[node.role](self, node, low)

    def _link(self, node: Node) -> Choice:
        (out,), source = node.outs, node.ins[0]
        if not self.graph.is_float32[out] or node.link is Link.BACK:
            return _LINKED
        if node.link in (Link.SLICE, Link.STACK, Link.INVARIANT):
            self.stored[out] = self.copies.get(source, self.stored[source])
        elif node.link is Link.JOIN:
            deciding = [v for v in node.ins if not self._is_filler(v)]
            formats = {self.copies.get(v, self.stored[v]) for v in deciding}
            self.stored[out] = formats.pop() if len(formats) == 1 else F32
        elif out in self.narrow_carries:
            self.stored[out] = self.narrow[OpKind.ELEMENTWISE]
        return _LINKED

    def _is_filler(self, value: int) -> bool:
        """Return whether a branch's result is as good in a narrow format, so that others decide."""
        low = self.narrow[OpKind.ELEMENTWISE]
        fills = low is not None and fits(self.graph.constants.get(value), low)
        return fills or value in self.gainless

    def _forced(self, node: Node, forced: Precision, by: str) -> Choice:
        if forced.bits >= F32.bits:
            return Choice(F32, F32, by, None, F32)
        if node.role is Role.CONTRACT and has_explicit_precision(node.eqn):
            return Choice(F32, F32, f"{EXPLICIT_PRECISION}; not followed: {by}", None, F32)
        if wrong := self._falsifies(node, forced):
            return Choice(F32, F32, f"{wrong.reason}; not followed: {by}", wrong.guard, F32)
        if node.trait is Trait.COLLECTIVE:  # rounded where it is sent: see communication.py
            return Choice(F32, forced, by, None, forced)
        return Choice(forced, forced, by, None, self._accumulation(node, forced))

    def _falsifies(self, node: Node, low: Precision) -> Constraint | None:
        """Return why a format makes wrong numbers of what a node reads or makes, or `None`.

        A rule decides what is worth its loss of accuracy; it makes no other integer of one, no
        infinity of a number, and no other sample. A product rounds what has been drawn.
        """
        values = [v for v in (*node.ins, *node.outs) if self.graph.is_float32[v]]
        found = [*misstated(self.graph, self.provenance, values, low)]
        if union(self.provenance.bits, values) & TINY:
            found.append(Constraint(f"depends on a constant beyond {low.short}", Guard.RANGE))
        if node.role is not Role.CONTRACT and not self.drawn.isdisjoint(values):
            found.append(Constraint("made of random bits", Guard.BITS))
        return next((constraint for constraint in found if constraint.guard in self.guards), None)

    @functools.cached_property
    def drawn(self) -> frozenset[int]:
        """Return samples, and the known numbers that they are made of."""
        drawn = set(find_drawn(self.graph))
        for node in reversed(self.graph.nodes):
            if not drawn.isdisjoint(node.outs):
                drawn.update(v for v in node.ins if v in self.graph.constants)
        return frozenset(drawn)

    def _unguarded(self, node: Node, low: Precision) -> Choice:
        if node.role is Role.CONTRACT and has_explicit_precision(node.eqn):
            return Choice(F32, F32, EXPLICIT_PRECISION, None, F32)
        inside = self._accumulation(node, low)
        operand = inside if node.role is Role.REDUCE and inside else low
        reason = f"{_IN_WORDS[node.kind]} are {low.short} in the policy"
        return Choice(operand, low, reason, None, inside)

    def _accumulation(self, node: Node, low: Precision) -> Precision | None:
        if node.role is Role.CONTRACT:
            return F32
        is_sum = node.role is Role.REDUCE and node.trait is not Trait.EXTREMUM
        if not is_sum or is_pooling_gradient(node):
            return None
        # A reduction that holds a jaxpr has that jaxpr's dtypes.
        typed = node.op is not None and bool(node.op.dtype_params)
        return F32 if typed else self.policy.accumulation or low

    def _contract(self, node: Node, low: Precision) -> Choice:
        uses = union(self.uses.bits, node.outs)
        constraint = constrain_contraction(
            self.graph, self.provenance, uses, self.policy, node, low
        )
        if constraint:
            self.solutions.update(node.outs if constraint is READS_SOLUTION else ())
            return Choice(F32, F32, constraint.reason, constraint.guard, F32)
        out = node.outs[0]
        if out in self.rescaled:
            reason = f"operands in {low.short}; result is scaled down before it is rounded"
            return Choice(low, F32, reason, Guard.RANGE, F32)
        if not self.uses.reaches[out]:
            if self.uses.escapes[out] and self.policy.allreduce is low:
                return Choice(low, low, f"a gradient: {low.short} for its sum over devices")
            if self._saves_memory(node, low):
                reason = f"larger than its operands: stored in {low.short}"
                return Choice(low, low, reason, None, F32)
            reason = f"operands in {low.short}; no later product reads the result"
            return Choice(low, F32, reason, Guard.NO_GAIN, F32)
        if Guard.SENSITIVE in self.guards and (why := self._sensitivity(out)):
            return Choice(low, F32, f"operands in {low.short}; {why}", Guard.SENSITIVE, F32)
        if Guard.LOOP_CARRY in self.guards and out in self.carried_wide:
            self.gainless.update(node.outs)
            reason = f"operands in {low.short}; result goes into an f32 carry"
            return Choice(low, F32, reason, Guard.LOOP_CARRY, F32)
        if out in self.returned:
            self.gainless.update(node.outs)
            reason = f"operands in {low.short}; result is returned in f32"
            return Choice(low, F32, reason, Guard.NO_GAIN, F32)
        return Choice(low, low, f"{_IN_WORDS[node.kind]} are {low.short} in the policy", None, F32)

    def _sensitivity(self, out: int) -> str:
        """Return why a contraction's result must not be rounded, empty if it may."""
        if out in self.graph.unrounded:
            return PRECISE.reason
        if out in self.hazards.lookup_places:
            return LOOKUP_PLACE.reason
        if out in self.hazards.ordered and is_small_beside_products(
            self.graph, self.product_sizes, out
        ):
            return "an index is taken from its order"
        readers = self.graph.readers[out]
        is_fed = all(r.role is Role.FIXED or r.trait is Trait.SENSITIVE for r in readers)
        return "result feeds a sensitive operation" * is_fed

    def _saves_memory(self, node: Node, low: Precision) -> bool:
        """Return whether a contraction that no Compute reads is large, and rounding it harmless."""
        if self._may_overflow(low):
            return False  # logits in f32
        graph, out = self.graph, node.outs[0]
        is_read_so = bool(self._compared[out]) and is_shift_invariant(graph, out)
        return is_read_so and outweighs_operands(graph, node)

    @functools.cached_property
    def _compared(self) -> bytearray:
        return find_compared(self.graph)

    def _reduce(self, node: Node, low: Precision) -> Choice:
        if node.trait is Trait.ALLREDUCE and (choice := self._add_up(node, low)):
            return choice
        dense = [v for v in node.outs if self.provenance.dense[v]]
        if node.kind is not OpKind.REDUCTION or not dense:
            return Choice(F32, F32, "a statistic is small: f32", Guard.REDUCTION_ISLAND, F32)
        if constraint := self._constraint(node, low):
            return Choice(F32, F32, constraint.reason, constraint.guard, F32)
        if self._may_overflow(low) and node.trait is not Trait.EXTREMUM:
            return Choice(F32, F32, "a sum may overflow f16", Guard.RANGE, F32)
        if node in self.few_cotangents:
            return Choice(low, low, f"adds up few cotangents: {low.short}, as the gather moves it")
        inside = self._accumulation(node, low)
        operand = inside or self._common(node, low)
        return Choice(operand, low, f"f32 inside, stored in {low.short}", None, inside)

    def _add_up(self, node: Node, low: Precision) -> Choice | None:
        """Choose for a sum over devices; `None` where it is a sum like any other."""
        wire = self.policy.allreduce
        dense = any(self.provenance.dense[v] for v in node.outs)
        in_parts = self._adds_up_parts(node, low)
        if wire.bits < F32.bits and (dense or in_parts):
            reason = f"summed over devices in {wire.short}, as the policy says"
        elif in_parts and not self._may_overflow(low):
            wire = low
            reason = f"summed over devices in {low.short}, as each device stores its part"
        else:
            return None
        stored = F32 if not dense or self._constraint(node, low) else low
        return Choice(wire, stored, reason, None, wire)

    def _adds_up_parts(self, node: Node, low: Precision) -> bool:
        """Return whether devices put together parts that each has in a narrow format.

        These are parts of an activation as it is stored, which devices of a program that XLA
        partitions add up so, too; or rows that each has found in its part of a table.
        """
        parts = (v in self.masked_rows or self._as_read(v, node) is low for v in node.ins)
        return all(parts) and self._bears_rounding(node, low)

    def _bears_rounding(self, node: Node, low: Precision) -> bool:
        """Return whether a product reads a node's results, and no reader amplifies a rounding."""
        if not union(self.uses.bits, node.outs) & REACHES or self.hazards.of(node, node.outs, low):
            return False
        return not any(is_subtracted(self.graph, self.provenance, v) for v in node.outs)

    def _elementwise(self, node: Node, low: Precision) -> Choice:
        (out,) = node.outs
        if not self.graph.is_float32[out]:
            return self._compare(node, low)
        if out in self.relu_tangents:
            return Choice(low, low, f"tangent of a ReLU: {low.short} before the mask, as after it")
        if out in self.masked_rows and (wire := self._wire_of(out, low)):
            return Choice(wire, wire, _ROWS.format(wire.short))
        constraint = precise(self.graph, self.guards, node) or self._constraint(node, low)
        if constraint:
            return Choice(F32, F32, constraint.reason, constraint.guard)
        if out in self.rescaled:
            return Choice(F32, F32, "result is scaled down before it is rounded", Guard.RANGE)
        if out in self.regions.bias_sums:
            return Choice(low, low, f"a bias: {low.short}, added by the convolution's kernel")
        operand = self._common(node, low) if self._is_safe_narrow(node) else F32
        return self._lowered(out, operand, low)

    def _is_safe_narrow(self, node: Node) -> bool:
        """Return whether narrow arithmetic loses no more than a rounding, in derivatives too.

        JAX derives a quotient by its divisor, and a root, as several operations on what they read:
        in a narrow format each would round, and the square of a reciprocal overflow float16.
        """
        if node.trait is not Trait.ROUNDED:
            return node.trait in (Trait.EXACT, Trait.SUM)
        return all(node.is_linear_in(v) for v in node.ins if v not in self.graph.constants)

    def _wire_of(self, value: int, low: Precision) -> Precision | None:
        """Return the narrow format in which devices add up a value, if nothing else reads it."""
        readers = self.graph.readers[value]
        if value in self.graph.outputs or not all(r.trait is Trait.ALLREDUCE for r in readers):
            return None
        found = {choice and choice.operand for choice in (self._add_up(r, low) for r in readers)}
        return found.pop() if len(found) == 1 else None

    def _compare(self, node: Node, low: Precision) -> Choice:
        """Choose for a comparison, such that equal values stay equal.

        A derivative of `max` compares operands with the result. Where one side is stored rounded,
        both are rounded before they are compared. Known numbers are exempt: `reduce_precision`
        flushes float16's subnormal numbers to zero.
        """
        rounded = any(self._as_read(value, node) is low for value in node.ins)
        known = any(value in self.graph.constants for value in node.ins)
        if rounded and not known and node.name in EQUALITIES:
            return Choice(F32, F32, f"compares operands rounded to {low.short}", None, low)
        return Choice(self._common(node, low), F32, "compares stored values")

    def _merge(self, node: Node, low: Precision) -> Choice:
        constraint = self._constraint(node, low)
        if constraint is None and any(self.graph.origin(v) in self.solutions for v in node.ins):
            constraint = READS_SOLUTION  # cotangents of an inverse: their differences may be read
        if constraint:
            return Choice(F32, F32, constraint.reason, constraint.guard)
        return self._lowered(node.outs[0], low, low)

    def _lowered(self, out: int, operand: Precision, low: Precision) -> Choice:
        if out in self.exact_narrow:
            return Choice(low, low, f"exact in {low.short}: readers widen it")
        return Choice(operand, low, f"stored in {low.short} for a later product")

    def _move(self, node: Node, low: Precision) -> Choice:
        is_label = is_label_gather(self.graph, self.provenance, node)
        if is_label and Guard.REDUCTION_ISLAND in self.guards:
            return _LABEL_GATHER
        if node in self.many_cotangents and self._as_read(node.ins[0], node) is low:
            reason = f"f32 inside, stored in {low.short}: many cotangents are summed"
            return Choice(F32, low, reason, Guard.REDUCTION_ISLAND, low)
        is_split = node in self.split_lookups and not self._may_overflow(low)
        if is_split and self._bears_rounding(node, low):
            words = _ROWS if self.split_lookups[node] else _POSSIBLE_ROWS
            return Choice(F32, low, words.format(low.short), None, low)
        return _MOVED

    def _follow(self, node: Node) -> None:
        for source, out in node.moves:
            if source in self.gainless:
                self.gainless.add(out)
            if self.graph.is_float32[out] and self.graph.is_float32[source]:
                self.stored[out] = self.stored[source]
                if source in self.copies:  # what is moved from a fused value is fused, or its copy
                    to = self.copies if self.regions.fused[out] else self.stored
                    to[out] = self.copies[source]

    def _common(self, node: Node, low: Precision) -> Precision:
        """Return `low` if all float operands have it or are literals that fit; else float32."""
        for atom, value in zip(node.eqn.invars, node.ins, strict=True):
            if not self.graph.is_float32[value]:
                continue
            if isinstance(atom, Literal):
                if not fits(self.graph.constants.get(value), low):
                    return F32
            elif self._as_read(value, node) is not low:
                return F32
        return low

    def _as_read(self, value: int, node: Node) -> Precision | None:
        if value in self.copies and self.regions.is_far(value, node):
            return self.copies[value]
        return self.stored[value]

    def _is_copied(self, node: Node, value: int) -> bool:
        """Return whether XLA would store a fused value anyway, for later readers."""
        return node.trait in COSTLY or bool(self.regions.forwarded[value])

    def _constraint(self, node: Node, low: Precision) -> Constraint | None:
        """Return why a value not computed by Compute has to stay in float32, or `None`."""
        outs = [v for v in node.outs if self.graph.is_float32[v]]
        if outs and self.relu_signs.issuperset(outs):
            return None
        if Guard.NO_GAIN in self.guards:
            if is_state_update(self.provenance, self.uses, node):
                return Constraint("updates a parameter or other state", Guard.NO_GAIN)
            if not union(self.uses.bits, outs) & REACHES:
                return Constraint("no later product reads it", Guard.NO_GAIN)
        hazard = self.hazards.of(node, outs, low)
        if Guard.NO_GAIN in self.guards and (what := self._what_is_small(outs)):
            if hazard is None:
                self.gainless.update(outs)
            return Constraint(f"{what}: nothing to gain", Guard.NO_GAIN)
        if hazard:
            return hazard
        if Guard.LOOP_CARRY in self.guards and not self.carried_wide.isdisjoint(outs):
            self.gainless.update(outs)
            return Constraint("goes into an f32 carry", Guard.LOOP_CARRY)
        if outs and self.returned.issuperset(outs):
            self.gainless.update(outs)
            return Constraint("returned in f32", Guard.NO_GAIN)
        if Guard.REDUCTION_ISLAND in self.guards and 0 not in [self.regions.fused[v] for v in outs]:
            narrow = narrow_values(self.graph, self.regions, node, self.stored, low)
            if narrow:
                self.exact_narrow.update(narrow)
                return None
            self.copies.update((v, low) for v in outs if self._is_copied(node, v))
            return Constraint("f32 inside a kernel, rounded when stored", Guard.REDUCTION_ISLAND)
        return None

    def _what_is_small(self, outs: Sequence[int]) -> str:
        """Return why a node's results are small, empty if they have an activation's size."""
        if not union(self.provenance.bits, outs) & DENSE:
            return "not an activation"
        graph, sizes = self.graph, self.product_sizes
        is_small = all(is_small_beside_products(graph, sizes, v) for v in outs)
        return "small beside the products that read it" if is_small else ""


_BY_ROLE = {
    Role.CONTRACT: Chooser._contract,
    Role.REDUCE: Chooser._reduce,
    Role.ELEMENTWISE: Chooser._elementwise,
    Role.MERGE: Chooser._merge,
    Role.MOVE: Chooser._move,
}

_IN_WORDS = {
    OpKind.COMPUTE: "products and convolutions",
    OpKind.REDUCTION: "reductions",
    OpKind.ELEMENTWISE: "elementwise operations",
    OpKind.DATA_MOVEMENT: "moves of data",
    OpKind.BOUNDARY: "callbacks and solvers",
}

_CARRIED = (Link.INIT, Link.BACK)

# Allocate uninitialized arrays.
_BLANK = ("empty", "empty2")

_ROWS = "rows of a split table: {}, as they are added up over devices"
_POSSIBLE_ROWS = "rows of a table that may be split: {}, as devices would add them up"
_MOVED = Choice(None, F32, "moves data in the dtype that it has")
_LABEL_GATHER = Choice(
    F32, F32, "label gather: cotangents are summed in f32", Guard.REDUCTION_ISLAND
)
_LINKED = Choice(None, F32, "passed into or out of a loop or branch")
_KEPT = ("keeps its original dtypes", None)
_FIXED_REASONS = {
    Trait.NO_KERNEL: ("no 16-bit kernel", Guard.NO_KERNEL),
    Trait.LINALG: ("no 16-bit kernel", Guard.NO_KERNEL),
    Trait.SOLVER: ("a solver converges in its own precision", Guard.NO_KERNEL),
    Trait.BITS: ("depends on the bits of a number", Guard.BITS),
    Trait.CALLBACK: ("a callback gets its original dtypes", Guard.CALLBACKS),
    Trait.STATE: ("a Ref has a fixed dtype", None),
    Trait.GENERATOR: ("not computed from floats", Guard.EXACT_INTEGER),
    Trait.BITWISE: ("integers and booleans", None),
    Trait.INTEGER: ("integers and booleans", None),
}
