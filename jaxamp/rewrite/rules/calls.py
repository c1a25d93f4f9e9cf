"""Emit calls: equations that hold a jaxpr and run it at most once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxamp.core import jax_compat
from jaxamp.jaxprs.interpret import bind_nested
from jaxamp.rewrite.interpreter import rewritten_bodies
from jaxamp.rewrite.primitives.accumulate import accumulate_p, contraction_of
from jaxamp.rewrite.primitives.block_product import block_product_p, dot_of
from jaxamp.rewrite.primitives.narrow_collective import collective_of, narrow_collective_p
from jaxamp.rewrite.registry import RuleContext, rewrites


@rewrites("jit", "closed_call", "call", "composite", "compute_on", "custom_vmap_call")
@rewrites("eval_jaxpr", "fused_call", "xla_metadata_call")
def call(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Rewrite the function that is called; a jit keeps its name, shardings and donation."""
    if not context.decision.inner:  # a region that an inner `amp` has rewritten
        return jax_compat.bind(context.eqn, operands)
    return bind_nested(context.eqn, operands, rewritten_bodies(context))


@rewrites("remat2")
def checkpoint(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Rewrite a checkpoint, with the same policy; its residuals are values as they are stored."""
    policy = _show_originals(context.eqn.params["policy"])
    return bind_nested(context.eqn, operands, rewritten_bodies(context), policy=policy)


def _show_originals(policy: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return a checkpoint policy that sees JAX's primitive where one of jaxamp's stands for it."""
    if policy is None:
        return None

    @functools.wraps(policy)
    def shown(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive is accumulate_p:
            primitive, params = contraction_of(params)
        elif primitive is narrow_collective_p:
            primitive, params = collective_of(params)
        elif primitive is block_product_p:
            primitive, avals, params = dot_of(avals, **params)
        return policy(primitive, *avals, **params)

    return shown
