"""Emit shard_map: its body is typed per device, so it is traced again where those types hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxamp.jaxprs.nested import called
from jaxamp.rewrite.interpreter import interpret
from jaxamp.rewrite.registry import RuleContext, rewrites


@rewrites("shard_map")
def shard_map(context: RuleContext, *operands: Any) -> Sequence[Any]:
    """Map the rewritten body over the same mesh with the same specs."""
    eqn, plan = context.eqn, context.decision.inner[0]
    params, mapped = eqn.params, called(eqn)

    def body(*args: Any) -> list[Any]:
        return interpret(context.rewrite, mapped.jaxpr, plan, (), args)

    run = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return run(*operands)
