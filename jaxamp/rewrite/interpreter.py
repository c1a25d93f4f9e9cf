"""The interpreter: walks a jaxpr beside its plan and emits what the plan says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision
from jaxamp.errors import JaxAmpError, RewriteError
from jaxamp.plan import Decision, Fusion, JaxprPlan, Remake, Step
from jaxamp.policy.techniques import Technique
from jaxamp.rewrite.environment import Environment
from jaxamp.rewrite.invariant_cotangents import same_each_turn
from jaxamp.rewrite.recorder import Log
from jaxamp.rewrite.registry import Context, rule_for
from jaxamp.xla.checkpoint_barriers import apart
from jaxamp.xla.fused_group import call_fused
from jaxamp.xla.rounded_cotangent import echo

# What a primitive raises when it does not accept the dtypes that it is given.
_REFUSALS = (TypeError, ValueError, NotImplementedError, LookupError, AttributeError)


def interpret_whole(
    context: Context, closed: ClosedJaxpr, plan: JaxprPlan, args: Sequence[Any]
) -> list[Any]:
    """Emits a program in a context of its own, which holds nothing once that is done."""
    try:
        return interpret(context, closed.jaxpr, plan, closed.consts, args)
    finally:
        context.forget()


def interpret(
    context: Context, jaxpr: Jaxpr, plan: JaxprPlan, consts: Sequence[Any], args: Sequence[Any]
) -> list[Any]:
    """Emits a jaxpr, equation by equation, in the precisions of its plan.

    Args:
      context: shared by the whole rewrite.
      jaxpr: the program.
      plan: what was decided for it.
      consts: values of its constants.
      args: those of ``plan.rounded`` and of ``plan.turned``, then its arguments, in the precisions
        of ``plan.inputs``.

    Returns:
      Its results, in the precisions of ``plan.outputs``.

    Raises:
      RewriteError: a primitive does not accept what was decided for it.
    """
    log = None if context.recorder is None else context.recorder.log(plan)
    env = Environment(log, holds=context.steers(Technique.HELD_ROUNDINGS))
    env.enter(jaxpr.constvars, consts)
    casts, wides = len(plan.rounded), len(plan.turned)
    env.take(plan.rounded, args[:casts])
    env.enter(jaxpr.invars, args[casts + wides :])
    narrow = [env.read(var, None) for var in plan.turned]
    env.enter(plan.turned, map(same_each_turn, narrow, args[casts : casts + wides]))
    env.enter([r.var for r in plan.remakes], map(_remake, plan.remakes))
    for step in plan.steps:
        if isinstance(step, Step):
            _fuse(context, step, env)
        else:
            _interpret_one(context, step, jaxpr.eqns[step], plan.decisions[step], env)
    return env.read_results(jaxpr.outvars, plan.outputs)


def _remake(remake: Remake) -> Any:
    values: dict[int, Any] = {}
    for eqn, numbers, ins, outs in remake.makings:
        operands = [values[v] if n is None else n for n, v in zip(numbers, ins, strict=True)]
        with jax_compat.emitting(eqn):
            values.update(zip(outs, jax_compat.bind(eqn, operands), strict=True))
    return values[remake.value]


def _interpret_one(
    context: Context, index: int, eqn: JaxprEqn, decision: Decision, env: Environment
) -> None:
    if env.log is not None:
        env.log.equation(index)
    with jax_compat.emitting(eqn):
        operands = _operands(eqn, decision, env)
        results = emit(context, eqn, decision, operands)
        if len(results) > len(eqn.outvars):
            env.enter_rounded(eqn.outvars, results[len(eqn.outvars) :])
        env.write(eqn.outvars, results, decision.outputs, decision.held, decision.kept)


def _operands(eqn: JaxprEqn, decision: Decision, env: Environment) -> list[Any]:
    """What an equation reads, as decided."""
    if decision.unheld:
        return list(map(env.read_unheld, eqn.invars, decision.operands))
    readings = decision.operands, decision.fresh, decision.copies
    operands = list(map(env.read, eqn.invars, *readings))
    return operands + [env.read(eqn.invars[index], p) for index, p in decision.also]


def _fuse(context: Context, step: Step, env: Environment) -> None:
    """Emits a fused group as one call; equal groups call the same one."""
    operands = env.give(step.takes)
    log = None if env.log is None else env.log.enter_group(step)
    key = step.fusion, tuple(map(jax.typeof, operands))
    if key not in context.fused or log is not None:  # what it reads was cast here or elsewhere
        context.fused[key] = _fused(context, step.fusion, log)
    with jax_compat.emitting(step.around):
        env.take(step.gives, context.fused[key](*operands))
    if log is not None and env.log is not None:
        env.log.leave_group(step, log)


def _fused(context: Context, fusion: Fusion, log: Log | None) -> Callable[..., list[Any]]:
    """A group under a checkpoint; JAX differentiates a jit of one once for all its calls."""
    again = _read_again(fusion)

    def emitted(*args: Any) -> list[Any]:
        env = Environment(log, holds=context.steers(Technique.HELD_ROUNDINGS))
        env.take(fusion.takes, apart(args, again) if again else args)
        pairs = zip(fusion.equations, fusion.decisions, strict=True)
        for index, (eqn, decision) in enumerate(pairs):
            _interpret_one(context, index, eqn, decision, env)
        return env.give(fusion.gives)

    def fused(*args: Any) -> list[Any]:
        return call_fused(emitted, *args)

    return jax.jit(fused) if fusion in context.repeated else fused


def _read_again(fusion: Fusion) -> list[bool]:
    """Whether what a group computes again reads each of its operands; empty if it does not."""
    read = {id(v) for eqn in fusion.equations[: fusion.makers] for v in eqn.invars}
    return [id(var) in read for var, _ in fusion.takes] if fusion.makers else []


def rewritten(context: Context, closed: ClosedJaxpr, plan: JaxprPlan) -> ClosedJaxpr:
    """A jaxpr that computes what the plan says; made once for each plan."""
    if plan.unchanged:
        return closed
    if plan not in context.rewritten:
        jaxpr = closed.jaxpr

        def body(*args: Any) -> list[Any]:
            return interpret(context, jaxpr, plan, closed.consts, args)

        arriving = [(var, form.precision) for var, form in plan.rounded]
        arriving += [(var, Precision.F32) for var in plan.turned]
        arriving += zip(jaxpr.invars, plan.inputs, strict=True)
        avals = [_arriving(var.aval, precision) for var, precision in arriving]
        context.rewritten[plan] = jax_compat.trace_to_jaxpr(body, avals, jaxpr.debug_info)
    return context.rewritten[plan]


def _arriving(aval: Any, precision: Any) -> Any:
    if precision is None or aval.dtype == precision.dtype:
        return aval
    return aval.update(dtype=precision.dtype, weak_type=False)


def emit(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """Emits one equation; operands come cast as decided, results are stored by the caller.

    Raises:
      RewriteError: the primitive does not accept what was decided for it.
    """
    try:
        if decision.echo:
            return [echo(eqn, operands, decision.echo)]
        return rule_for(eqn.primitive)(context, eqn, decision, operands)
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
