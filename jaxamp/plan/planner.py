"""Plan a jaxpr under a policy."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import replace

from jax.extend.core import ClosedJaxpr

from jaxamp.core import features, jax_compat
from jaxamp.core.formats import Precision, is_narrow
from jaxamp.core.guards import Guard
from jaxamp.core.taxonomy import OpKind
from jaxamp.errors import UnknownPrimitiveError
from jaxamp.plan.assemble import assemble, ground_of
from jaxamp.plan.conditioning.hazards import Hazards
from jaxamp.plan.conditioning.precise_products import enter_products
from jaxamp.plan.conditioning.undone_sums import find_undone
from jaxamp.plan.dataflow.dataflow import Dataflow
from jaxamp.plan.dataflow.fused_groups import Groups
from jaxamp.plan.dataflow.linearity import Linearity
from jaxamp.plan.dataflow.provenance import find_factors
from jaxamp.plan.dataflow.ranges import find_ranges
from jaxamp.plan.dataflow.regions import FusionRegions
from jaxamp.plan.decision import Plan
from jaxamp.plan.findings import Draft, Findings, Steering
from jaxamp.plan.graph.graph import Frame, Graph, sites_of
from jaxamp.plan.graph.unfold import Sequel, unfold
from jaxamp.plan.precision.buffers import narrow_buffers
from jaxamp.plan.precision.carries import settle_carries
from jaxamp.plan.precision.choose import Chooser
from jaxamp.plan.precision.communication import find_communication, narrow_varying
from jaxamp.plan.precision.operand_reads import OperandReads
from jaxamp.plan.precision.overrides import Forced, find_forced
from jaxamp.plan.precision.stored_joins import store_bias_sums, store_joins
from jaxamp.policy.policy import PrecisionPolicy


def make_plan(
    closed_jaxpr: ClosedJaxpr,
    policy: PrecisionPolicy,
    *,
    strict: bool = False,
    inputs: Sequence[Precision | None] | None = None,
    outputs: Sequence[Precision | None] | None = None,
    onward: Sequence[bool] | None = None,
    later: Sequence[bool] = (),
    forms: bool = True,
    deciding: frozenset[Hashable] = frozenset(),
    sequel: Sequel | None = None,
) -> Plan:
    """Decide, for every equation of a jaxpr, in which precision it runs.

    Pure analysis: nothing is traced, and nothing computed but matrices of known numbers.

    Args:
      closed_jaxpr: the program.
      policy: the policy.
      strict: whether an unknown primitive is an error.
      inputs: precision in which each input arrives; by default its dtype in the jaxpr.
      outputs: precision in which each result has to leave; by default that of the jaxpr.
      later: whether each input arrives only when all that does not need it has been computed, as
        tangents do; by default none.
      onward: whether Compute outside reads each result; by default those that leave narrow.
      forms: whether features choose after the core, and may give operations forms of their own.
      deciding: what `shape_of` says of products, elsewhere, that decide when a loop stops.
      sequel: what is made of the results later, if that is known.

    Raises:
      UnknownPrimitiveError: ``strict`` and a primitive is unknown.

    >>> import jax
    >>> from jaxamp.core.guards import Guard
    >>> from jaxamp.policy.policy import PrecisionPolicy
    >>> jaxpr = jax.make_jaxpr(lambda x, w: x @ w)(jax.numpy.ones((2, 3)), jax.numpy.ones((3, 4)))
    >>> print(make_plan(jaxpr, PrecisionPolicy.MIXED_BF16))
    plan under mixed_bf16
    dot_general            Compute        bf16 -> f32   operands in bf16; no later product ...
    """
    graph, frame = unfold(closed_jaxpr, sequel)
    if strict and graph.unknown:
        raise _unknown(graph)
    onward = onward or [is_narrow(p) for p in outputs or ()]
    _apply_signature(graph, frame.entries, inputs or (), frame.exits, onward)
    graph.later.update(v for v, is_later in zip(frame.entries, later, strict=False) if is_later)
    graph.deciding = deciding
    find_ranges(graph)
    find_factors(graph)
    enter_products(graph)
    find_undone(graph)
    forced = find_forced(graph, policy)
    findings = _find(graph, frame, policy, forced, inputs or (), forms=forms)
    grounds = {site: ground_of(site, findings.choices) for site in sites_of(frame)}
    steering = _steer(findings)
    body = assemble(findings, steering, grounds, outputs)
    return Plan(
        body=body,
        grounds=tuple(grounds.values()),
        policy=policy,
        rule_counts=forced.rule_counts,
        unknown=tuple(graph.unknown),
        jaxpr=closed_jaxpr,
        repeated=frozenset(steering.outline.repeated),
    )


def plan_program(
    closed_jaxpr: ClosedJaxpr, policy: PrecisionPolicy, *, strict: bool = False
) -> Plan:
    """Plan a whole program, in which features first replace the regions that they know.

    The `jaxpr` of the plan is what is to be emitted.
    """
    found: list[features.Outcome] = []
    refused: list[features.Outcome] = []
    for replace_regions in itertools.chain(*(work.replace for work in features.works())):
        closed_jaxpr, more, others = replace_regions(closed_jaxpr, policy)
        found += more
        refused += others
    plan = make_plan(closed_jaxpr, policy, strict=strict)
    return replace(plan, found=tuple(found), refused=tuple(refused)) if found or refused else plan


def _steer(findings: Findings) -> Steering:
    """Return the hints for a compiler: none, where no feature has them."""
    steers = (work.steer for work in features.works() if work.steer)
    return next((steer(findings) for steer in steers), Steering())


def _find(
    graph: Graph,
    frame: Frame,
    policy: PrecisionPolicy,
    forced: Forced,
    inputs: Sequence[Precision | None],
    *,
    forms: bool,
) -> Findings:
    """Run the analyses, each on the findings of those before it."""
    flow = Dataflow(graph, *settle_carries(graph, policy, forced), FusionRegions(graph))
    linearity = Linearity(graph, flow.provenance)
    store_bias_sums(flow)
    store_joins(flow, linearity)
    hazards = Hazards(flow, linearity, policy)
    chooser = Chooser(flow, hazards, policy)
    choices = chooser.choose_all(frame.entries, inputs, forced)
    stored, exact_narrow = chooser.stored, chooser.exact_narrow
    narrow_buffers(flow, stored, choices)
    choices.update(narrow_varying(flow, policy, stored, choices))
    choices.update(find_communication(flow, frame, policy, stored, choices))
    precisions = policy, flow, hazards, forced, stored, choices
    draft = Draft(*precisions)
    for work in features.works() if forms else ():
        if work.choose:
            choices.update(work.choose(draft))
    fuses = Guard.REDUCTION_ISLAND in policy.guards and bool(policy.low)
    return Findings(
        *precisions,
        frame=frame,
        narrow=chooser.narrow[OpKind.ELEMENTWISE],
        exact_narrow=exact_narrow,
        relu_signs=chooser.relu_signs,
        readings=OperandReads(flow, chooser.copies, stored, policy),
        groups=Groups(flow, frame, stored, exact_narrow) if fuses else None,
    )


def _apply_signature(
    graph: Graph,
    entries: Sequence[int],
    inputs: Sequence[Precision | None],
    exits: Sequence[int],
    onward: Sequence[bool],
) -> None:
    """Mark narrow inputs as activations, and results that Compute outside reads."""
    for value, precision in zip(entries, inputs, strict=False):
        if is_narrow(precision):
            graph.activations.add(value)
            graph.sources.discard(value)
    for value, goes_on in zip(exits, onward, strict=False):
        if goes_on:
            graph.onward.add(value)
            graph.outputs.discard(value)


def _unknown(graph: Graph) -> UnknownPrimitiveError:
    name, eqn = next(iter(graph.unknown.items()))
    return UnknownPrimitiveError(
        f"jaxamp does not know the primitive {name!r}, and strict=True forbids leaving it in its "
        f"original dtypes. Teach it with jaxamp.register_op_kind({name!r}, kind), or drop strict.",
        primitive=name,
        source=jax_compat.user_line(eqn.source_info),
    )
