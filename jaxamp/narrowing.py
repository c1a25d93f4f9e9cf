"""Parameters stored narrow: programs that read low-precision copies without casting them.

A program that ``amp`` has rewritten reads its f32 parameters through casts. Where every use of a
parameter is the same cast, perhaps behind a gather, slice, transpose or loop, the parameter can be
cast once and for all: ``narrow_dtypes`` finds these, and ``run_narrow`` runs the program on them.
The results are those of f32 parameters bit for bit, because what only moves values commutes with
what rounds them. A narrow value that some operation does need wide is widened there, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxamp import _compat
from jaxamp.plan.wiring import Body, body_of, branches, call_body, loop
from jaxamp.rewrite.accumulate import accumulate_p, parted
from jaxamp.taxonomy import Trait, lookup

Needs: TypeAlias = set[np.dtype]
"""The dtypes in which a value is used; empty for a value that is not."""

_INLINED = ("closed_call", "custom_jvp_call", "custom_vjp_call", "remat2")  # nobody differentiates


def narrow_dtypes(closed: ClosedJaxpr, count: int) -> list[np.dtype | None]:
    """For each of the first inputs the narrow dtype that all its uses cast it to.

    Args:
      closed: a program.
      count: how many of its inputs are looked at.

    Returns:
      A dtype for an input that is better stored in it, ``None`` for any other.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda w, b, x: (w.T @ x.T).astype("bfloat16") + b)
    >>> narrow_dtypes(program(*map(jnp.ones, ((2, 3), 1, (4, 2)))), 2)
    [None, None]
    >>> program = jax.make_jaxpr(lambda w, b, x: w.T.astype("bfloat16") @ x + b)
    >>> narrow_dtypes(program(*map(jnp.ones, ((2, 3), 1, 2))), 2)
    [dtype(bfloat16), None]
    """
    jaxpr = closed.jaxpr
    found = _input_needs(jaxpr, _own_needs(jaxpr.outvars))[:count]
    return [_narrower(var.aval, needs) for var, needs in zip(jaxpr.invars, found, strict=False)]


def run_narrow(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """Run a program on inputs of which some are narrower than it was made for.

    Args:
      closed: the program.
      *args: its flat inputs.

    Returns:
      Its flat results, in the dtypes that it declares.
    """
    return list(map(_widened, _run(body_of(closed), args), closed.jaxpr.outvars))


# --- Which inputs: backward through the program --------------------------------------------------


def _input_needs(jaxpr: Jaxpr, wanted: Sequence[Needs]) -> list[Needs]:
    """In which dtypes the inputs are used, if the results are used as wanted."""
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
        operands, origins = parted(own, eqn.params["rounded"])
        return [*operands, *(set() for _ in origins)]
    if _only_moves(eqn):
        return [*results, *own[len(results) :]]
    if name == "jit" or name in _INLINED:
        return _input_needs(call_body(eqn).jaxpr, results)
    if name == "cond":
        inner = [_input_needs(b.jaxpr, _own_needs(b.jaxpr.outvars)) for b in branches(eqn)]
        return [own[0], *(set().union(*uses) for uses in zip(*inner, strict=True))]
    if name in ("scan", "while"):
        return _loop_needs(eqn, own)
    return own


def _loop_needs(eqn: JaxprEqn, own: list[Needs]) -> list[Needs]:
    """Invariants and slices as the body uses them; carries as they are."""
    wiring = loop(eqn)
    tests, invariants, carries = wiring.test_invariants, wiring.invariants, wiring.carries
    inner = _input_needs(wiring.body.jaxpr, _own_needs(wiring.body.jaxpr.outvars))
    split = tests + invariants, tests + invariants + carries
    return [
        *own[:tests],
        *inner[:invariants],
        *own[split[0] : split[1]],
        *inner[split[1] - tests :],
    ]


def _own_needs(atoms: Sequence[Any]) -> list[Needs]:
    return [{atom.aval.dtype} if hasattr(atom.aval, "dtype") else set() for atom in atoms]


def _only_moves(eqn: JaxprEqn) -> bool:
    op = lookup(eqn.primitive)
    return op is not None and op.trait is Trait.SHAPE and not op.dtype_params


def _narrower(aval: Any, needs: Needs) -> np.dtype | None:
    if len(needs) != 1 or not jnp.issubdtype(aval.dtype, jnp.floating):
        return None
    (dtype,) = needs
    is_narrower = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < aval.dtype.itemsize
    return dtype if is_narrower else None


# --- The program on narrow inputs: forward, led by the dtypes that come --------------------------


def _run(body: Body, args: Sequence[Any]) -> list[Any]:
    """Emit a program on inputs that may be narrow; its results may be narrow too."""
    jaxpr = body.jaxpr
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*body.consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        operands = [_compat.read_atom(env, atom) for atom in eqn.invars]
        with _compat.emitting(eqn):
            env.update(zip(eqn.outvars, _emit(eqn, operands), strict=True))
    return [_compat.read_atom(env, atom) for atom in jaxpr.outvars]


def _emit(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    if not any(map(_is_narrow, operands, eqn.invars)):
        return _compat.bind(eqn, operands)
    rule = _RULES.get(eqn.primitive.name)
    if rule is not None:
        return rule(eqn, operands)
    if _only_moves(eqn):
        return _compat.bind(eqn, operands)
    return _compat.bind(eqn, list(map(_widened, operands, eqn.invars)))


def _convert(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """The cast that is saved; from a narrow value to anything else it is exact or the same."""
    if operands[0].dtype == eqn.params["new_dtype"]:
        return operands
    return _compat.bind(eqn, list(map(_widened, operands, eqn.invars)))


def _accumulate(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Nobody differentiates: what the operands are roundings of is not needed."""
    kept, _ = parted(operands, eqn.params["rounded"])
    return _compat.bind(eqn, list(map(_widened, kept, eqn.invars)), rounded=())


def _jit(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    return _compat.bind(eqn, operands, jaxpr=_retyped(call_body(eqn), operands, wide=False))


def _inline(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    return _run(call_body(eqn), operands)


def _cond(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    retyped = tuple(_retyped(branch, operands[1:]) for branch in branches(eqn))
    return _compat.bind(eqn, operands, branches=retyped)


def _loop(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Carries and what the test reads are widened; invariants and slices come as they are."""
    wiring = loop(eqn)
    tests, invariants = wiring.test_invariants, wiring.test_invariants + wiring.invariants
    operands = [
        operand
        if tests <= i < invariants or i >= invariants + wiring.carries
        else _widened(operand, atom)
        for i, (operand, atom) in enumerate(zip(operands, eqn.invars, strict=True))
    ]
    name = "jaxpr" if wiring.test is None else "body_jaxpr"
    return _compat.bind(eqn, operands, **{name: _retyped(wiring.body, operands[tests:])})


_RULES: dict[str, Callable[[JaxprEqn, Sequence[Any]], Sequence[Any]]] = {
    "accumulate": _accumulate,
    "convert_element_type": _convert,
    "jit": _jit,
    "cond": _cond,
    "scan": _loop,
    "while": _loop,
    **dict.fromkeys(_INLINED, _inline),
}


def _retyped(body: Body, operands: Sequence[Any], *, wide: bool = True) -> ClosedJaxpr:
    """The program of a body for inputs of other dtypes; wide results have those it declares."""

    def run(*args: Any) -> list[Any]:
        results = _run(body, args)
        return list(map(_widened, results, body.jaxpr.outvars)) if wide else results

    dtypes = [getattr(operand, "dtype", None) for operand in operands]
    avals = [_as_dtype(var.aval, d) for var, d in zip(body.jaxpr.invars, dtypes, strict=True)]
    return _compat.trace_to_jaxpr(run, avals, body.jaxpr.debug_info)


def _as_dtype(aval: Any, dtype: Any) -> Any:
    return aval if dtype is None or aval.dtype == dtype else aval.update(dtype=dtype)


def _is_narrow(value: Any, atom: Any) -> bool:
    return hasattr(value, "dtype") and value.dtype != atom.aval.dtype


def _widened(value: Any, atom: Any) -> Any:
    return value.astype(atom.aval.dtype) if _is_narrow(value, atom) else value
