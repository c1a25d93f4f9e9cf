"""Runs a program on narrow inputs: forward, led by the dtypes that come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxamp.core import jax_compat
from jaxamp.jaxprs.interpret import bind_nested, evaluate
from jaxamp.jaxprs.nested import called, loop, nested
from jaxamp.rewrite.primitives.accumulate import split_originals
from jaxamp.tools.serving.transparent import INLINED, only_moves


def run_narrow(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """Run a program on inputs of which some are narrower than it was made for.

    Args:
      closed: the program.
      *args: its flat inputs.

    Returns:
      Its flat results, in the dtypes that it declares.
    """
    return list(map(_widened, evaluate(closed, args, _emit), closed.jaxpr.outvars))


def _emit(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    if not any(map(_is_narrow, operands, eqn.invars)):
        return jax_compat.bind(eqn, operands)
    rule = _RULES.get(eqn.primitive.name)
    if rule is not None:
        return rule(eqn, operands)
    if only_moves(eqn):
        return jax_compat.bind(eqn, operands)
    return jax_compat.bind(eqn, list(map(_widened, operands, eqn.invars)))


def _convert(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Skip the cast that is saved; from a narrow value to another dtype it is exact or the same."""
    if operands[0].dtype == eqn.params["new_dtype"]:
        return operands
    return jax_compat.bind(eqn, list(map(_widened, operands, eqn.invars)))


def _accumulate(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Emit a contraction without the f32 originals of its operands: nobody differentiates."""
    kept, _ = split_originals(operands, eqn.params["rounded"])
    return jax_compat.bind(eqn, list(map(_widened, kept, eqn.invars)), rounded=())


def _jit(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    return bind_nested(eqn, operands, [_retyped(called(eqn), operands, wide=False)])


def _inline(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    return evaluate(called(eqn), operands, _emit)


def _cond(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    return bind_nested(eqn, operands, [_retyped(b, operands[1:]) for b in nested(eqn)])


def _loop(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Emit a loop with its carries and its test widened; invariants and slices as they come."""
    wired = loop(eqn)
    tested, invariants, carries, sliced = wired.parts(operands)
    tests, _, inits, _ = wired.parts(eqn.invars)
    given = [*invariants, *map(_widened, carries, inits), *sliced]
    *test, body = nested(eqn)
    return bind_nested(eqn, [*map(_widened, tested, tests), *given], [*test, _retyped(body, given)])


_RULES: dict[str, Callable[[JaxprEqn, Sequence[Any]], Sequence[Any]]] = {
    "accumulate": _accumulate,
    "convert_element_type": _convert,
    "jit": _jit,
    "cond": _cond,
    "scan": _loop,
    "while": _loop,
    **dict.fromkeys(INLINED, _inline),
}


def _retyped(body: ClosedJaxpr, operands: Sequence[Any], *, wide: bool = True) -> ClosedJaxpr:
    """Retrace a body for inputs of other dtypes; wide results have those that it declares."""

    def run(*args: Any) -> list[Any]:
        results = evaluate(body, args, _emit)
        return list(map(_widened, results, body.jaxpr.outvars)) if wide else results

    dtypes = [getattr(operand, "dtype", None) for operand in operands]
    avals = [_as_dtype(var.aval, d) for var, d in zip(body.jaxpr.invars, dtypes, strict=True)]
    return jax_compat.trace_to_jaxpr(run, avals, body.jaxpr.debug_info)


def _as_dtype(aval: Any, dtype: Any) -> Any:
    return aval if dtype is None or aval.dtype == dtype else aval.update(dtype=dtype)


def _is_narrow(value: Any, atom: Any) -> bool:
    return hasattr(value, "dtype") and value.dtype != atom.aval.dtype


def _widened(value: Any, atom: Any) -> Any:
    return value.astype(atom.aval.dtype) if _is_narrow(value, atom) else value
