"""Tracing functions to jaxprs, and reading jaxprs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax._src import core as _core
from jax._src import linear_util as _lu
from jax._src import util as _util
from jax._src.interpreters import partial_eval as _pe
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal

from jaxamp.core.jax_compat.avals import lie_alike

_T = TypeVar("_T")

DropVar = _core.DropVar


def is_tracing() -> bool:
    """Return whether a JAX transformation is tracing the code that runs now."""
    return not _core.trace_state_clean()


def is_staging() -> bool:
    """Return whether operations that run now are recorded into a jaxpr, as under ``jax.jit``."""
    trace = _core.trace_ctx.trace
    while trace is not None and not isinstance(trace, _pe.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def static_parameters(fn: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Return the positions and names of the static arguments of a ``jax.jit``."""
    info = getattr(fn, "_jit_info", None)
    numbers, names = getattr(info, "static_argnums", ()), getattr(info, "static_argnames", ())
    return frozenset(numbers), frozenset(names)


def host_placement(fn: Any) -> dict[str, Any]:
    """Return the word of a ``jax.jit`` by which it leaves results in host memory; empty if none do.

    JAX heeds it in the outermost ``jax.jit`` alone.
    """
    info = getattr(fn, "_jit_info", None)
    leaves = getattr(info, "out_shardings_leaves", ())
    kinds = [getattr(place, "memory_kind", None) or "" for place in leaves]
    if info is None or not any("host" in kind for kind in kinds):
        return {}
    return {"out_shardings": jax.tree.unflatten(info.out_shardings_treedef, leaves)}


def kept_with(function: Callable[[ClosedJaxpr], _T]) -> Callable[[ClosedJaxpr], _T]:
    """Return a function of a jaxpr whose results are kept for as long as the jaxpr lives."""
    cached = _util.weakref_lru_cache(function)
    return functools.wraps(function)(lambda closed: cached(closed))


def trace_to_jaxpr(
    fun: Callable[..., Sequence[Any]], avals: Sequence[Any], debug_info: Any
) -> ClosedJaxpr:
    """Trace a flat function at exact avals: weak types, shardings and Refs are kept."""
    wrapped = _lu.wrap_init(fun, debug_info=debug_info.with_unknown_names())
    jaxpr, _, consts = _pe.trace_to_jaxpr_dynamic(wrapped, list(avals))
    return ClosedJaxpr(jaxpr, consts)


def within(eqn: JaxprEqn, change: Callable[[], _T]) -> _T:
    """Return what `change` returns where it is called as the body of an equation is traced.

    The body of a ``shard_map`` has its mesh with manual axes, and types that say along which of
    them values vary: what is traced for it needs both.
    """
    if eqn.primitive.name != "shard_map":
        return change()
    made: list[_T] = []
    params = eqn.params
    mapped = jax.shard_map(
        lambda: made.append(change()),
        mesh=params["mesh"],
        in_specs=(),
        out_specs=None,
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    jax.eval_shape(mapped)
    return made[0]


def result_avals(fun: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> tuple[Any, ...]:
    """Return the result avals of a flat function for the avals of its arguments."""
    info = DebugInfo("types", "types", None, None)
    return tuple(trace_to_jaxpr(fun, avals, info).out_avals)


def sharded_alike(
    fun: Callable[..., Sequence[Any]], avals: Sequence[Any], wanted: Sequence[Any]
) -> bool:
    """Return whether types let a flat function be computed, and give its results such shardings."""
    try:
        results = result_avals(fun, avals)
    except _core.ShardingTypeError:
        return False
    return all(map(lie_alike, results, wanted))


def without_constvars(jaxpr: Jaxpr) -> Jaxpr:
    """Make the variables of constants the first inputs."""
    return _pe.convert_constvars_jaxpr(jaxpr)


def literal_value(literal: Literal) -> Any:
    """Return the value of a literal as a numpy or Python scalar."""
    return literal.val
