"""shard_map: its body is typed per device, so it is traced again where those types hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jaxamp.jaxprs.nested import called
from jaxamp.plan import Decision
from jaxamp.rewrite.interpreter import interpret
from jaxamp.rewrite.registry import Context, rewrites


@rewrites("shard_map")
def shard_map(
    context: Context, eqn: JaxprEqn, decision: Decision, operands: Sequence[Any]
) -> Sequence[Any]:
    """Maps the rewritten body over the same mesh with the same specs."""
    params, plan, mapped = eqn.params, decision.inner[0], called(eqn)

    def body(*args: Any) -> list[Any]:
        return interpret(context, mapped.jaxpr, plan, (), args)

    run = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return run(*operands)
