"""Walk a jaxpr beside its plan, and emit each equation as the plan says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.errors import JaxAmpError, RewriteError
from jaxamp.jaxprs.nested import nested
from jaxamp.plan import Decision, EquationPlan, Fusion, FusionCall, JaxprPlan, RematerializedInput
from jaxamp.plan.graph.consumers import ADDS
from jaxamp.rewrite.environment import Environment
from jaxamp.rewrite.registry import RewriteContext, RoundedResults, RuleContext, rule_for

# What a primitive raises when it does not accept the dtypes that it is given.
_REFUSALS = (TypeError, ValueError, NotImplementedError, LookupError, AttributeError)


def interpret_whole(
    context: RewriteContext, closed: ClosedJaxpr, plan: JaxprPlan, args: Sequence[Any]
) -> list[Any]:
    """Emit a program in a context of its own, which holds nothing once that is done."""
    try:
        return interpret(context, closed.jaxpr, plan, closed.consts, args)
    finally:
        context.forget()


def interpret(
    context: RewriteContext,
    jaxpr: Jaxpr,
    plan: JaxprPlan,
    consts: Sequence[Any],
    args: Sequence[Any],
    *,
    forms: Sequence[Any] = (),
) -> list[Any]:
    """Emit a jaxpr, equation by equation, in the precisions of its plan.

    Arguments come in ``plan.inputs``, with other forms of them, ``plan.invariant_forms``; results
    leave in ``plan.outputs``.

    Raises:
      RewriteError: a primitive does not accept the dtypes decided for it.
    """
    env = Environment(context.emitter)
    env.enter(jaxpr.constvars, consts)
    env.enter(jaxpr.invars, args)
    for (i, precision), form in zip(plan.invariant_forms, forms, strict=True):
        env.enter_form(jaxpr.invars[i], precision, form)
    rematerialized = plan.rematerialized
    env.enter([r.var for r in rematerialized], map(_rematerialize, rematerialized))
    for step in plan.steps:
        if isinstance(step, FusionCall):
            _fuse(context, step, env)
        else:
            _interpret_one(context, jaxpr.eqns[step], plan.decisions[step], env)
    return env.read_results(jaxpr.outvars, plan.outputs)


def _rematerialize(wanted: RematerializedInput) -> Any:
    values: dict[int, Any] = {}
    for eqn, atoms, results in wanted.equations:
        operands = [values[atom] if isinstance(atom, int) else atom for atom in atoms]
        with jax_compat.emitting(eqn):
            values.update(zip(results, jax_compat.bind(eqn, operands), strict=True))
    return values[wanted.value]


def _interpret_one(
    context: RewriteContext, eqn: JaxprEqn, decision: Decision, env: Environment
) -> None:
    with jax_compat.emitting(eqn):
        operands = _read_operands(eqn, decision.plan, env)
        emitted = emit(rule_context(context, eqn, decision, env), operands)
        env.enter_casts(eqn.outvars, emitted.roundings)
        plan = decision.plan
        hints, are_sums = plan.hints, eqn.primitive.name in ADDS
        columns = emitted.results, plan.outputs, hints.barriers, hints.residuals
        env.write(eqn.outvars, *columns, are_sums=are_sums)


def _read_operands(eqn: JaxprEqn, plan: EquationPlan, env: Environment) -> list[Any]:
    """Read the operands of an equation, as decided."""
    if plan.hints.unbarriered:
        return list(map(env.read_unbarriered, eqn.invars, plan.reads))
    return list(map(env.read_operand, eqn.invars, plan.reads))


def rule_context(
    context: RewriteContext, eqn: JaxprEqn, decision: Decision, env: Environment
) -> RuleContext:
    """Return what a rule is given, with the other forms of operands that were decided."""
    plan, operands = decision.plan, eqn.invars
    moved = plan.hints.moved_rounding
    return RuleContext(
        rewrite=context,
        eqn=eqn,
        decision=decision,
        originals={i: env.read(operands[i], None) for i in plan.originals},
        rounding=None if moved is None else env.read(operands[0], moved),
        invariant_forms=[env.read_form(operands[i], p) for i, p in plan.invariant_forms],
    )


def _fuse(context: RewriteContext, call: FusionCall, env: Environment) -> None:
    """Emit a fused group as one call; equal groups call the same one."""
    operands = env.read_all(call.inputs)
    key = call.fusion, tuple(map(jax.typeof, operands))
    if key not in context.fused:
        context.fused[key] = _fused(context, call.fusion)
    with jax_compat.emitting(call.around):
        env.enter_read(call.outputs, context.fused[key](*operands))


def _fused(context: RewriteContext, fusion: Fusion) -> Callable[..., list[Any]]:
    """Return a group as one function; JAX differentiates a jit once for all its calls."""

    def emitted(*args: Any) -> list[Any]:
        env = Environment(context.emitter)
        env.enter_read(fusion.inputs, args)
        for eqn, decision in zip(fusion.equations, fusion.decisions, strict=True):
            _interpret_one(context, eqn, decision, env)
        return env.read_all(fusion.outputs)

    fused = context.emitter.fused(emitted, fusion)
    return jax.jit(fused) if fusion in context.repeated else fused


def rewritten_bodies(context: RuleContext) -> list[ClosedJaxpr]:
    """Rewrite the jaxprs that an equation holds, each by its plan."""
    pairs = zip(nested(context.eqn), context.decision.plan.inner, strict=True)
    return [_rewrite(context.rewrite, *pair) for pair in pairs]


def _rewrite(context: RewriteContext, closed: ClosedJaxpr, plan: JaxprPlan) -> ClosedJaxpr:
    """Rewrite a jaxpr, once for each plan; its first inputs are other forms of invariants."""
    if plan.unchanged:
        return closed
    if plan not in context.rewritten:
        jaxpr, own = closed.jaxpr, len(plan.invariant_forms)

        def body(*args: Any) -> list[Any]:
            return interpret(context, jaxpr, plan, closed.consts, args[own:], forms=args[:own])

        arriving: list[tuple[Any, Precision | None]]
        arriving = [(jaxpr.invars[i], precision) for i, precision in plan.invariant_forms]
        arriving += zip(jaxpr.invars, plan.inputs, strict=True)
        avals = [_stored_aval(var.aval, precision) for var, precision in arriving]
        context.rewritten[plan] = jax_compat.trace_to_jaxpr(body, avals, jaxpr.debug_info)
    return context.rewritten[plan]


def _stored_aval(aval: Any, precision: Precision | None) -> Any:
    """Return the type of a value that is stored in a precision."""
    if precision is None or aval.dtype == precision.dtype:
        return aval
    return aval.update(dtype=precision.dtype, weak_type=False)


def emit(context: RuleContext, operands: Sequence[Any]) -> RoundedResults:
    """Emit one equation; operands come cast as decided, results are stored by the caller.

    Raises:
      RewriteError: the primitive does not accept the dtypes decided for it.
    """
    eqn, decision = context.eqn, context.decision
    try:
        emitted = rule_for(decision)(context, *operands)
        return emitted if isinstance(emitted, RoundedResults) else RoundedResults(emitted)
    except JaxAmpError:
        raise
    except _REFUSALS as error:
        operand = decision.operand.short if decision.operand else "its own dtype"
        raise RewriteError(
            f"{eqn.primitive.name} could not be emitted with operands in {operand} "
            f"({decision.reason}): {type(error).__name__}: {error}\nKeep it as it is with "
            f'policy.with_rules(Rule(primitive="{eqn.primitive.name}", precision="f32")) or '
            "`with jaxamp.keep_precision('f32'):` around it.",
            primitive=eqn.primitive.name,
            source=decision.source,
        ) from error
