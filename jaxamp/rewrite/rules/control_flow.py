"""Emit calls, loops and branches: bodies rewritten, the rest of the equation as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp.core import jax_compat
from jaxamp.core.define import ORIGINALS
from jaxamp.jaxprs.interpret import bind_nested
from jaxamp.jaxprs.nested import called, loop
from jaxamp.rewrite.interpreter import interpret, rewritten_bodies
from jaxamp.rewrite.registry import RuleContext, rewrites


@rewrites("jit", "closed_call", "call", "composite", "compute_on", "custom_vmap_call")
@rewrites("cond", "eval_jaxpr", "fused_call", "xla_metadata_call")
def call(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Rewrite what is called; a jit keeps its name, shardings and donation.

    Of a branch that is all functions: their plans agree on the dtypes of the results.
    """
    if not context.decision.plan.inner:  # a region that an inner `amp` has rewritten
        return jax_compat.bind(context.eqn, operands)
    return bind_nested(context.eqn, operands, rewritten_bodies(context))


@rewrites("remat2")
def checkpoint(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Rewrite a checkpoint, with the same policy; its residuals are values as they are stored."""
    given = context.eqn.params
    changes: dict[str, Any] = {"policy": _show_originals(given["policy"])}
    if context.decision.plan.hints.lone:
        changes["prevent_cse"] = False
    return bind_nested(context.eqn, operands, rewritten_bodies(context), **changes)


def _show_originals(policy: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return a checkpoint policy that sees JAX's primitive where one of jaxamp's stands for it."""
    if policy is None:
        return None

    @functools.wraps(policy)
    def shown(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive in ORIGINALS:
            primitive, avals, params = ORIGINALS[primitive](avals, params)
        return policy(primitive, *avals, **params)

    return shown


@rewrites("shard_map")
def shard_map(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Map the rewritten body over the same mesh with the same specs.

    Of a part over some axes whose types do not say what varies, JAX adds up cotangents as they
    leave it: in float32, as a CPU does not add up others (see ``narrow_collective``).
    """
    eqn, plan = context.eqn, context.decision.plan.inner[0]
    params, mapped = eqn.params, called(eqn)
    is_partial = params["newly_manual_axes"] < set(params["mesh"].axis_names)
    wide = [is_partial and not params["check_vma"] and x.dtype == jnp.bfloat16 for x in operands]

    def body(*args: Any) -> list[Any]:
        return interpret(context.rewrite, mapped.jaxpr, plan, (), _cast(args, wide, jnp.bfloat16))

    run = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return run(*_cast(operands, wide, np.float32))


def _cast(values: Sequence[Any], which: Sequence[bool], dtype: Any) -> list[Any]:
    pairs = zip(values, which, strict=True)
    return [jax_compat.convert(x, dtype) if is_cast else x for x, is_cast in pairs]


@rewrites("scan")
def scan(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Rewrite the body; a carry has one dtype throughout, slices and stacks have their own.

    Other forms of invariants become invariants of the new loop.
    """
    forms = context.invariant_forms
    layout = jax_compat.scan_with_invariants(context.eqn, len(forms))
    return bind_nested(context.eqn, [*forms, *operands], rewritten_bodies(context), **layout)


@rewrites("while")
def while_loop(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Rewrite the body; the carry keeps its dtype, and the test is left in f32."""
    forms = context.invariant_forms
    wired = loop(context.eqn)
    tested, fixed, carries, _ = wired.parts(operands)
    given, count = [*tested, *forms, *fixed, *carries], wired.invariants + len(forms)
    return bind_nested(context.eqn, given, rewritten_bodies(context), body_nconsts=count)
