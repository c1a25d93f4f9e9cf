"""Saved and recomputed residuals of ``jax.checkpoint``, and primitives that behave as it does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import compress
from types import FunctionType, SimpleNamespace
from typing import Any
from weakref import WeakSet

from jax._src import ad_checkpoint as _ad_checkpoint
from jax._src import checkify as _checkify
from jax._src import core as _core
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _pe
from jax._src.state import discharge as _discharge
from jax.extend.core import DebugInfo, Jaxpr, JaxprEqn, Literal, Primitive

from jaxamp.core.jax_compat.tracing import trace_to_jaxpr, without_constvars

_REMAT = _ad_checkpoint.remat_p
_TABLES: tuple[dict[Any, Any], ...] = (
    _ad.primitive_jvps,
    _ad.fancy_transposes,
    _batching.fancy_primitive_batchers,
    _checkify.error_checks,
    _discharge._discharge_rules,
    _pe.custom_partial_eval_rules,
    _pe.dce_rules,
)


def is_saved(policy: Callable[..., Any], eqn: JaxprEqn) -> bool:
    """Return whether a checkpoint policy saves an equation's results, on the device or off it."""
    case = policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)
    return _pe.ensure_enum(case) is not _pe.Recompute


def read_by_recomputation(jaxpr: Jaxpr) -> list[bool]:
    """Return which operands of a checkpoint's backward pass the recomputed forward pass reads.

    >>> import jax
    >>> square = jax.checkpoint(lambda x: jax.numpy.sin(x) ** 2)
    >>> *_, backward = jax.make_jaxpr(jax.grad(square))(1.0).eqns
    >>> read_by_recomputation(backward.params["jaxpr"])
    [True, False]
    """
    read = {
        var
        for eqn in jaxpr.eqns
        if any(getattr(s, "name", None) == _RECOMPUTED for s in eqn.source_info.name_stack.stack)
        for var in eqn.invars
        if not isinstance(var, Literal)
    }
    return [var in read for var in jaxpr.invars]


_RECOMPUTED = "rematted_computation"  # the scope in which JAX puts recomputed equations


def define_checkpoint(primitive: Primitive, policy: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Define a primitive that is differentiated and batched as ``jax.checkpoint`` is.

    JAX's rules for checkpoints bind its own primitive, by a global name. The new primitive gets
    copies of them that bind it instead, and JAX's tables keep what they hold. It differs in one
    thing: the forward pass of a derivative stays an equation of the primitive, where JAX leaves
    what a checkpoint computes. Its lowering is left to the caller. What is returned calls a flat
    function, from arrays to a list of arrays, as one equation.
    """
    primitive.multiple_results = True
    primitive.def_impl(_REMAT.impl)
    primitive.def_effectful_abstract_eval(_REMAT.abstract_eval)
    fixed = {"prevent_cse": True, "policy": policy}

    def evaluate(jaxpr: Jaxpr, consts: Any, *args: Any) -> list[Any]:
        outputs = {id(atom): atom for atom in jaxpr.outvars}
        if len(outputs) == len(jaxpr.outvars):
            return primitive.bind(*consts, *args, jaxpr=jaxpr, differentiated=False, **fixed)
        # What is both a result and a residual is returned once, so that it is stored once.
        debug_info = jaxpr.debug_info.with_unknown_names()
        once = jaxpr.replace(outvars=[*outputs.values()], debug_info=debug_info)
        found = dict(zip(outputs, evaluate(once, consts, *args), strict=True))
        return [found[id(atom)] for atom in jaxpr.outvars]

    names = {
        "remat_p": primitive,
        "ad_checkpoint": SimpleNamespace(remat_p=primitive),
        "core": SimpleNamespace(**{**vars(_core), "eval_jaxpr": evaluate}),
        "pe": SimpleNamespace(**{**vars(_pe), "dce_jaxpr": _without_dead_code}),
    }
    for table in _TABLES:
        table[primitive] = with_globals(table[_REMAT], names)
    _pe.partial_eval_jaxpr_custom_rules[primitive] = functools.partial(_within_checkpoint, policy)

    info = DebugInfo(primitive.name, primitive.name, None, None)

    def fused(function: Callable[..., list[Any]], *args: Any) -> list[Any]:
        closed = trace_to_jaxpr(function, [_core.typeof(x) for x in args], info)
        return evaluate(without_constvars(closed.jaxpr), closed.consts, *args)

    return fused  # programs and profiles show a group by this name


def _without_dead_code(jaxpr: Jaxpr, used: list[bool], **others: Any) -> tuple[Jaxpr, list[bool]]:
    """Drop what nothing uses; what has no more of it stays the same object, which caches know.

    JAX asks some twenty times of each group while it differentiates a scan of checkpoints. From JAX
    0.12 on it says besides which of its mutable arrays are read later: a group has none.
    """
    if jaxpr in _LIVE and all(used):
        return jaxpr, [True] * len(jaxpr.invars)
    live, read = _pe.dce_jaxpr(jaxpr, used, **others)
    _LIVE.add(live)
    return live, read


_LIVE = WeakSet[Jaxpr]()


def _within_checkpoint(
    own: Callable[..., Any], outer: Callable[..., Any], unknown: Any, instantiated: Any, eqn: Any
) -> Any:
    """Split an equation of such a primitive inside of a checkpoint with a policy of its own.

    That policy is asked about the equation as a whole. If it saves what it has never heard of, it
    saves the results, and inside what `own` saves; else it is asked about each equation inside.
    """
    rule: Any = _pe.partial_eval_jaxpr_custom_rules[_REMAT]
    avals = [atom.aval for atom in eqn.invars]
    if _pe.ensure_enum(outer(eqn.primitive, *avals, **eqn.params)) is not _pe.Saveable:
        return rule(outer, unknown, instantiated, eqn)
    known, staged, unknown, instantiated, residuals = rule(own, unknown, instantiated, eqn)
    saved = {v for v, u in zip(eqn.outvars, unknown, strict=True) if not u}
    outvars = [_core.DropVar(v.aval) if v in saved else v for v in staged.outvars]
    return known, staged.replace(outvars=outvars), unknown, unknown, residuals


def split_by_operand(primitive: Primitive, flags: str) -> None:
    """Let JAX tell apart which results of a primitive are known: each has one operand.

    JAX takes them all for unknown where one is. The matrix of a solve in a rule of `custom_jvp`
    would be as unknown as the tangents that are solved for, and could not be transposed. `flags`
    is the primitive's parameter that has a number for each operand.
    """

    def rule(_: Any, unknown: Any, instantiated: Any, eqn: Any) -> Any:
        known = [not u for u in unknown]
        chosen = (eqn.invars, eqn.outvars, eqn.params[flags])
        invars, outvars, kept = ([*compress(values, known)] for values in chosen)
        params = {**eqn.params, flags: tuple(kept)}
        early = eqn.replace(invars=invars, outvars=outvars, params=params) if invars else None
        needed = [v for v, is_there in zip(eqn.invars, instantiated, strict=True) if not is_there]
        return early, eqn, unknown, [True] * len(known), needed

    def traced(trace: Any, *operands: Any, **params: Any) -> list[Any]:
        known = [x.is_known() for x in operands]
        kept = {**params, flags: tuple(compress(params[flags], known))}
        found = iter(
            primitive.bind(*[x.pval.get_known() for x in compress(operands, known)], **kept)
        )
        return [next(found) if is_known else x for x, is_known in zip(operands, known, strict=True)]

    _pe.partial_eval_jaxpr_custom_rules[primitive] = rule
    _pe.custom_partial_eval_rules[primitive] = traced


def with_globals(rule: Any, names: dict[str, Any]) -> Any:
    """Return a copy of a function with other objects under some of its global names."""
    if not isinstance(rule, FunctionType) or not names.keys() & set(rule.__code__.co_names):
        return rule  # binds the primitive of the equation that it is given
    copy = FunctionType(
        rule.__code__,
        {**rule.__globals__, **names},
        rule.__name__,
        rule.__defaults__,
        rule.__closure__,
    )
    copy.__kwdefaults__ = rule.__kwdefaults__
    return functools.update_wrapper(copy, rule)
