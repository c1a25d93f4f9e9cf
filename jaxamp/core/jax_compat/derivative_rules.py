"""Rules of ``custom_jvp`` and ``custom_vjp``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax._src import linear_util as _lu
from jax._src.interpreters import ad as _ad
from jax.extend.core import JaxprEqn, Primitive

from jaxamp.core.jax_compat.release import JAX


def linearize_by(primitive: Primitive, linearize: Callable[..., tuple[Any, bool, Any]]) -> None:
    """Register how JAX linearizes a primitive, rather than evaluate its JVP in part each time.

    The rule gets which operands have tangents, and the operands. It returns the result, whether
    that has a tangent, and what computes it from those of the operands.
    """
    structured = (None,) if JAX >= (0, 11) else ()  # residuals of another kind, since 0.11

    def rule(_: bool, moving: Sequence[bool], *primals: Any, **params: Any) -> Any:
        out, moves, along = linearize(moving, *primals, **params)
        return out, moves, (), *structured, lambda *given: along(*given[1 + len(structured) :])

    _ad.primitive_linearizations[primitive] = rule


def bind_custom_jvp(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    fun: Callable[..., Sequence[Any]],
    rule: Callable[..., Sequence[Any]],
) -> list[Any]:
    """Bind ``custom_jvp_call`` with a new function and a new flat rule (primals then tangents)."""
    debug_info = eqn.params["call_jaxpr"].jaxpr.debug_info.with_unknown_names()
    subfuns = (
        _lu.wrap_init(fun, debug_info=debug_info),
        _lu.wrap_init(rule, debug_info=debug_info),
    )
    return eqn.primitive.bind(
        *operands, subfuns=subfuns, symbolic_zeros=eqn.params["symbolic_zeros"]
    )


def bind_custom_vjp(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    fun: Callable[..., Sequence[Any]],
    forward: Callable[..., Sequence[Any]],
    backward: Callable[..., tuple[Sequence[Any], Any]],
) -> list[Any]:
    """Bind ``custom_vjp_call`` with a new function and new flat rules.

    ``forward`` takes (value, is-differentiated) pairs, ``backward`` residuals then cotangents and
    returns what `backward_results` does.
    """
    debug_info = eqn.params["call_jaxpr"].jaxpr.debug_info.with_unknown_names()

    def without_logs(*args: Any) -> Any:
        return backward(*args)[0]

    # 0.11 has backward rules return what they log beside the cotangents.
    rule = backward if JAX >= (0, 11) else without_logs
    subfuns = tuple(_lu.wrap_init(f, debug_info=debug_info) for f in (fun, forward, rule))
    return eqn.primitive.bind(
        *operands,
        subfuns=subfuns,
        out_trees=eqn.params["out_trees"],
        symbolic_zeros=eqn.params["symbolic_zeros"],
    )


def backward_results(eqn: JaxprEqn, args: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """Return the cotangents of a ``custom_vjp_call``'s backward rule, and what the rule logs."""
    results = eqn.params["bwd"].call_wrapped(*args)
    return results if JAX >= (0, 11) else (results, None)  # 0.11 introduced logs


def jvp_rule(eqn: JaxprEqn) -> Any:
    """Return the user's rule of a ``custom_jvp_call``, and its calling convention.

    ``None`` where the rule also depends on arguments that are not differentiated, and for all other
    primitives.
    """
    if eqn.primitive.name != "custom_jvp_call":
        return None
    thunk = _closure(eqn.params["jvp_jaxpr_fun"].f).get("fn")
    rule = _closure(thunk).get("jvp")
    if rule is None or rule.params:
        return None
    names = [transform.__name__ for transform, _ in rule.transforms]
    if names != ["_flatten_jvp"]:  # another may hold values that the rule depends on
        return None
    ((_, (*how, _)),) = rule.transforms  # the last is a thunk of the results' types
    return rule.f, tuple(how), rule.in_type


def _closure(function: Any) -> dict[str, Any]:
    """Return the variables that a function captures, by name."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def refuse_captured(differentiated: Sequence[bool]) -> None:
    """Raise JAX's own error if a ``custom_vjp`` is differentiated by a captured value."""
    if any(differentiated):
        raise _ad.CustomVJPException()


def transpose(
    primitive: Primitive, cotangent: Any, aval: Any, others: Sequence[Any], params: dict[str, Any]
) -> Any:
    """Return the cotangent of a primitive's first operand, of type `aval`, by JAX's own rule.

    A reshard has a rule of a newer kind, which adds the cotangent up itself, and since JAX 0.12 a
    gather.
    """
    if rule := _ad.primitive_transposes.get(primitive):
        return rule(cotangent, _ad.UndefinedPrimal(aval), *others, **params)[0]
    total = _ad.ValAccum(aval)
    _ad.fancy_transposes[primitive](cotangent, total, *others, **params)
    return total.freeze()
