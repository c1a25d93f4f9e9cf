"""Rewrite the functions of custom_jvp and custom_vjp, and their derivative rules.

The rules are programs that JAX traces only when it differentiates, at the original dtypes. They
are planned then, with the precisions in which their inputs really arrive and their results must
leave: cotangents and tangents have the dtype of their primal. A forward rule is planned with what
the backward rule makes of its residuals, as that may amplify a rounding of these. Only the plan of
the function knows the place of its products in a network: where features gave none of them a form,
they give none to those of its rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.core.formats import Precision, is_narrow
from jaxamp.core.guards import Guard
from jaxamp.core.taxonomy import OpKind
from jaxamp.jaxprs.nested import called
from jaxamp.plan import Decision, JaxprPlan, make_plan
from jaxamp.plan.dataflow.repeated_decisions import shape_of
from jaxamp.plan.graph.unfold import Sequel
from jaxamp.rewrite.interpreter import interpret, interpret_whole
from jaxamp.rewrite.registry import RewriteContext, RuleContext, rewrites

Precisions = Sequence[Precision | None]


@rewrites("custom_jvp_call")
def custom_jvp(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Bind a new function and a new rule; symbolic zeros stay what they are."""
    eqn, plan, rewrite = context.eqn, context.decision.plan.inner[0], context.rewrite
    call = called(eqn)
    if plan.unchanged:
        return jax_compat.bind(eqn, operands)
    consts = eqn.params["num_consts"]

    def function(*args: Any) -> list[Any]:
        return interpret(rewrite, call.jaxpr, plan, call.consts, args)

    def rule(*primals_and_tangents: Any) -> list[Any]:
        half = len(primals_and_tangents) // 2
        primals = primals_and_tangents[consts:half]
        tangents = primals_and_tangents[half + consts :]
        return _run_jvp(rewrite, eqn, plan, primals, tangents)

    return jax_compat.bind_custom_jvp(eqn, operands, function, rule)


def _run_jvp(
    rewrite: RewriteContext,
    eqn: JaxprEqn,
    plan: JaxprPlan,
    primals: Sequence[Any],
    tangents: Sequence[Any],
) -> list[Any]:
    """Trace the rule for the tangents that are no symbolic zeros, then run it."""
    zeros = [jax_compat.is_symbolic_zero(t) for t in tangents]
    jaxpr, captured, out_zeros = _traced(eqn.params["jvp_jaxpr_fun"], zeros)
    saves = any(any(inner.plan.hints.residuals) for inner in plan.walk())
    closed = rewrite.emitter.rule(ClosedJaxpr(jaxpr, captured), saves=saves)
    given = [t for t, is_zero in zip(tangents, zeros, strict=True) if not is_zero]
    made = [p for p, is_zero in zip(plan.outputs, out_zeros, strict=True) if not is_zero]
    wanted = [*plan.outputs, *made]
    # Tangents go on: transposed, what made them must have been narrow.
    onward = [*map(is_narrow, plan.outputs), *[True] * len(made)]
    later = [*[False] * len(primals), *[True] * len(given)]
    results = _run_rule(rewrite, plan, closed, [*primals, *given], wanted, onward, later)
    return _with_zeros(results, out_zeros)


@rewrites("custom_vjp_call")
def custom_vjp(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Bind a new function, forward rule and backward rule; residuals may be narrow."""
    eqn, plan, rewrite = context.eqn, context.decision.plan.inner[0], context.rewrite
    call = called(eqn)
    consts = eqn.params["num_consts"]
    primal_avals = [jax.typeof(x) for x in operands]
    saved_avals: list[Any] = []  # of the residuals that the forward rule gives, as it was written

    def function(*args: Any) -> list[Any]:
        return interpret(rewrite, call.jaxpr, plan, call.consts, args)

    def forward(*pairs: Any) -> list[Any]:
        values, differentiated = pairs[::2], pairs[1::2]
        jax_compat.refuse_captured(differentiated[:consts])
        jaxpr, captured = _traced(eqn.params["fwd_jaxpr_thunk"], differentiated[consts:])
        count = len(jaxpr.outvars) - len(plan.outputs)
        saved_avals[:] = [v.aval for v in jaxpr.outvars[:count]]
        wanted = [*[None] * count, *plan.outputs]
        closed = ClosedJaxpr(jaxpr, captured)
        sequel = _find_sequel(eqn, plan, closed, _backward_avals(eqn, saved_avals))
        return _run_rule(rewrite, plan, closed, values[consts:], wanted, sequel=sequel)

    def backward(*residuals_and_cotangents: Any) -> tuple[list[Any], Any]:
        avals = _backward_avals(eqn, saved_avals)
        pairs = zip(primal_avals[consts:], call.jaxpr.invars[consts:], strict=True)
        wanted = [_stored(arriving.dtype, var.aval) for arriving, var in pairs]
        given, logs = _run_backward(rewrite, eqn, plan, residuals_and_cotangents, avals, wanted)
        none = [jax_compat.zero_cotangent(aval) for aval in primal_avals[:consts]]
        return [*none, *given], logs

    return jax_compat.bind_custom_vjp(eqn, operands, function, forward, backward)


@rewrites("remat_opt")
def optimized_forward(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Emit the forward rule of a ``custom_vjp`` with ``optimize_remat`` in place.

    JAX's optimisation, which drops residuals that a checkpoint does not need, is given up.

    See: https://docs.jax.dev/en/latest/_autosummary/jax.custom_vjp.defvjp.html
    """
    body, plan = called(context.eqn), context.decision.plan.inner[0]
    return interpret(context.rewrite, body.jaxpr, plan, body.consts, operands)


def _traced(rule: Any, args: Sequence[bool]) -> Any:
    """Trace a rule; where it fails, as one may that wants numbers, say how it gets them."""
    try:
        return rule.call_wrapped(*args)
    except (IndexError, TypeError) as error:
        error.add_note(
            "amp traces a function before it is differentiated, as jax.jit does, so rules of "
            "derivatives are given no numbers: put amp around the gradient, amp(jax.grad(f))."
        )
        raise


def _backward_avals(eqn: JaxprEqn, saved_avals: Sequence[Any]) -> list[Any]:
    """Return the types of the backward rule's arguments as it was written.

    Residuals that are inputs of the function are not saved but named by their index.
    """
    _, _, forwarded = eqn.params["out_trees"]()
    saved = iter(saved_avals)
    residuals = [next(saved) if f is None else eqn.invars[f].aval for f in forwarded]
    return [*residuals, *(jax_compat.to_cotangent_aval(v.aval) for v in eqn.outvars)]


def _find_sequel(
    eqn: JaxprEqn, plan: JaxprPlan, forward: ClosedJaxpr, avals: Sequence[Any]
) -> Sequel | None:
    """Return what the backward rule makes of what the forward rule gives, if products are rounded.

    None where the function captures arrays, which its forward rule does not take, or where the rule
    refuses what is not known yet: JAX calls it later, and shows its errors.
    """
    if eqn.params["num_consts"] or not _products(plan):
        return None

    def backward(*args: Any) -> list[Any]:
        results, _ = jax_compat.backward_results(eqn, args)
        return [r for r in results if not jax_compat.is_symbolic_zero(r)]

    try:
        program = jax_compat.trace_to_jaxpr(backward, avals, called(eqn).jaxpr.debug_info)
    except Exception:  # whatever a user's rule raises
        return None
    _, _, forwarded = eqn.params["out_trees"]()
    saved = itertools.count(len(forward.jaxpr.invars))
    return program, [next(saved) if f is None else f for f in forwarded]


def _run_backward(
    rewrite: RewriteContext,
    eqn: JaxprEqn,
    plan: JaxprPlan,
    args: Sequence[Any],
    avals: Sequence[Any],
    wanted: Precisions,
) -> tuple[list[Any], Any]:
    """Trace the backward rule at its own dtypes, run it, and return cotangents and what it logs."""
    # Symbolic zeros stay what they are, and so do residuals that are plain Python or numpy values:
    # the rule may branch on them.
    arrays = [i for i, arg in enumerate(args) if isinstance(arg, jax.Array)]
    zeros: list[Any] = []  # per result: a symbolic zero, or None for an array
    logged: Any = None  # its structure

    def traced(*values: Any) -> list[Any]:
        nonlocal logged
        full = list(args)
        for i, value in zip(arrays, values, strict=True):
            full[i] = value
        results, logs = jax_compat.backward_results(eqn, full)
        zeros[:] = [r if jax_compat.is_symbolic_zero(r) else None for r in results]
        leaves, logged = jax.tree.flatten(logs)
        return [*(r for r in results if not jax_compat.is_symbolic_zero(r)), *leaves]

    debug_info = called(eqn).jaxpr.debug_info
    closed = jax_compat.trace_to_jaxpr(traced, [avals[i] for i in arrays], debug_info)
    nonzero_wanted = [p for p, z in zip(wanted, zeros, strict=True) if z is None]
    as_written = [_stored(np.float32, v.aval) for v in closed.jaxpr.outvars[len(nonzero_wanted) :]]
    given = [args[i] for i in arrays]
    results = iter(_run_rule(rewrite, plan, closed, given, [*nonzero_wanted, *as_written]))
    cotangents = [
        next(results) if zero is None else _retyped(zero, precision)
        for zero, precision in zip(zeros, wanted, strict=True)
    ]
    return cotangents, jax.tree.unflatten(logged, results)


def _run_rule(
    rewrite: RewriteContext,
    function: JaxprPlan,
    closed: ClosedJaxpr,
    args: Sequence[Any],
    wanted: Precisions,
    onward: Sequence[bool] | None = None,
    later: Sequence[bool] = (),
    sequel: Sequel | None = None,
) -> list[Any]:
    """Plan and run a rule of a planned function, in the precisions in which arguments arrive."""
    arriving = [
        _stored(jax.typeof(arg).dtype, var.aval)
        for arg, var in zip(args, closed.jaxpr.invars, strict=True)
    ]
    products = _products(function)
    plan = make_plan(
        closed,
        rewrite.policy,
        forms=not products or any(d.plan.form for d in products),
        inputs=arriving,
        outputs=wanted,
        onward=onward,
        later=later,
        sequel=sequel,
        deciding=frozenset(shape_of(d.eqn) for d in products if d.guard is Guard.LOOP_CARRY),
    )
    fresh = RewriteContext(rewrite.policy)
    return interpret_whole(fresh, closed, plan.body, args)


def _products(plan: JaxprPlan) -> list[Decision]:
    return [decision for decision in plan.walk() if decision.kind is OpKind.COMPUTE]


def _stored(dtype: Any, declared: Any) -> Precision | None:
    """Return the precision of a value declared float32 and stored as ``dtype``."""
    is_float32 = jax_compat.is_castable(declared) and declared.dtype == np.float32
    return Precision.parse(dtype) if is_float32 else None


def _retyped(zero: Any, precision: Precision | None) -> Any:
    return zero if precision is None else type(zero)(zero.aval.update(dtype=precision.dtype))


def _with_zeros(results: Sequence[Any], out_zeros: Sequence[bool]) -> list[Any]:
    """Return the results of a jvp jaxpr, with the tangents that it leaves out put back."""
    primals, tangents = results[: len(out_zeros)], iter(results[len(out_zeros) :])
    along = [
        SymbolicZero(jax.typeof(primal).to_tangent_aval()) if zero else next(tangents)
        for primal, zero in zip(primals, out_zeros, strict=True)
    ]
    return [*primals, *along]
