"""Narrow inputs: which of a program's can be, and how it runs on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxamp.core import jax_compat
from jaxamp.core.taxonomy import Trait, op_of
from jaxamp.jaxprs.interpret import bind_nested, evaluate
from jaxamp.jaxprs.nested import called, loop, nested
from jaxamp.rewrite.primitives.accumulate import accumulate_p, split_originals

# Nobody differentiates.
_INLINED = ("closed_call", "custom_jvp_call", "custom_vjp_call", "fused_group", "remat2")
_MOVES = (Trait.SAME, Trait.PLACEMENT, Trait.SHAPE, Trait.PART)

Needs: TypeAlias = set[np.dtype]
"""The dtypes in which a value is used; empty for a value that is not."""


def narrow_dtypes(closed: ClosedJaxpr, count: int) -> list[np.dtype | None]:
    """Return for each of the first inputs the narrow dtype to which all its uses cast it.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda w, b, x: w.T.astype("bfloat16") @ x + b)
    >>> narrow_dtypes(program(*map(jnp.ones, ((2, 3), 1, 2))), 2)
    [dtype(bfloat16), None]
    """
    jaxpr = closed.jaxpr
    found = _input_needs(jaxpr, _own_needs(jaxpr.outvars))[:count]
    return [_narrower(var.aval, needs) for var, needs in zip(jaxpr.invars, found, strict=False)]


def _input_needs(jaxpr: Jaxpr, wanted: Sequence[Needs]) -> list[Needs]:
    """Return the dtypes in which inputs are used, if the results are used as wanted."""
    needs: dict[Var, Needs] = {}

    def add(atoms: Sequence[Any], uses: Sequence[Needs]) -> None:
        for atom, use in zip(atoms, uses, strict=False):
            if not isinstance(atom, Literal):
                needs.setdefault(atom, set()).update(use)

    add(jaxpr.outvars, wanted)
    for eqn in reversed(jaxpr.eqns):
        results = [needs.get(var, set()) for var in eqn.outvars]
        add(eqn.invars, _operand_needs(eqn, results))
    return [needs.get(var, set()) for var in jaxpr.invars]


def _operand_needs(eqn: JaxprEqn, results: Sequence[Needs]) -> list[Needs]:
    name = eqn.primitive.name
    if name == "convert_element_type":
        return [{eqn.params["new_dtype"]}]
    own = _own_needs(eqn.invars)
    if eqn.primitive is accumulate_p:  # what its operands are roundings of is not computed with
        operands, originals = split_originals(own, eqn.params["rounded"])
        return [*operands, *(set() for _ in originals)]
    if _only_moves(eqn):
        return [*results, *own[len(results) :]]
    if name == "jit" or name in _INLINED:
        return _input_needs(called(eqn).jaxpr, results)
    if name == "cond":
        inner = [_input_needs(b.jaxpr, _own_needs(b.jaxpr.outvars)) for b in nested(eqn)]
        return [own[0], *(set().union(*uses) for uses in zip(*inner, strict=True))]
    if name in ("scan", "while"):
        return _loop_needs(eqn, own)
    return own


def _loop_needs(eqn: JaxprEqn, own: list[Needs]) -> list[Needs]:
    """Return the invariants and slices as the body uses them; carries as they are."""
    wired, body = loop(eqn), nested(eqn)[-1].jaxpr
    tests, _, carries, _ = wired.parts(own)
    inner = _input_needs(body, _own_needs(body.outvars))
    _, invariants, _, sliced = wired.parts([*tests, *inner])
    return [*tests, *invariants, *carries, *sliced]


def _own_needs(atoms: Sequence[Any]) -> list[Needs]:
    return [{atom.aval.dtype} if hasattr(atom.aval, "dtype") else set() for atom in atoms]


def _narrower(aval: Any, needs: Needs) -> np.dtype | None:
    if len(needs) != 1 or not jnp.issubdtype(aval.dtype, jnp.floating):
        return None
    (dtype,) = needs
    is_narrower = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < aval.dtype.itemsize
    return dtype if is_narrower else None


def run_narrow(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """Run a program on flat inputs of which some are narrower than it was made for."""
    return list(map(_widened, evaluate(closed, args, _emit), closed.jaxpr.outvars))


def _emit(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    if not any(map(_is_narrow, operands, eqn.invars)):
        return jax_compat.bind(eqn, operands)
    rule = _RULES.get(eqn.primitive.name)
    if rule is not None:
        return rule(eqn, operands)
    if _only_moves(eqn):
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
    "jit": lambda eqn, ops: bind_nested(eqn, ops, [_retyped(called(eqn), ops, wide=False)]),
    "cond": lambda eqn, ops: bind_nested(eqn, ops, [_retyped(b, ops[1:]) for b in nested(eqn)]),
    "scan": _loop,
    "while": _loop,
    **dict.fromkeys(_INLINED, lambda eqn, ops: evaluate(called(eqn), ops, _emit)),
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


def _only_moves(eqn: JaxprEqn) -> bool:
    """Return whether an equation moves numbers of any dtype, and computes none."""
    op = op_of(eqn.primitive)
    return op.trait in _MOVES and not op.dtype_params
