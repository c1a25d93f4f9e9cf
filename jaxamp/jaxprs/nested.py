"""Jaxprs inside equations: which parameter of which primitive holds them, and how they are wired.

``TABLE`` is the one place in the project that knows. Everything that descends into a program goes
through ``nested``, and everything that changes one goes back through ``with_nested``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxamp.core import jax_compat, taxonomy
from jaxamp.core.taxonomy import Trait

REGION_PREFIX = "jaxamp_region"  # name of the jit that holds what `amp` has already rewritten
RULED = frozenset({"custom_jvp_call", "custom_vjp_call"})  # have derivatives of their own


class Wiring(enum.Enum):
    """Correspondence of a nested jaxpr's inputs and outputs with operands and results."""

    CALL = "call"  # inputs are the operands, outputs the results
    UNIT = "unit"  # as CALL, but a compiler may replace the whole: its signature is fixed
    BRANCHES = "branches"  # operand 0 chooses one jaxpr, which takes the other operands
    SCAN = "scan"  # operands: invariants, initial carries, sliced arrays; results: carries, stacks
    WHILE = "while"  # operands: invariants of the test, those of the body, initial carries
    SCALAR = "scalar"  # a function of scalars, such as that of a reduction: not entered
    OPAQUE = "opaque"  # a kernel, or a program that other code runs: not entered

    __hash__ = object.__hash__  # Enum's own goes through the name, in Python


@dataclass(frozen=True, slots=True)
class NestedParams:
    """Parameters of a higher-order primitive that hold jaxprs, and how those are wired.

    Attributes:
      wiring: how its jaxprs are wired.
      params: the parameters that hold jaxprs, open or closed, or tuples of them; some have another
        name in another release of JAX, and are then not there.
      rules: parameters that make jaxprs of derivatives once JAX asks for them; left alone.
    """

    wiring: Wiring
    params: tuple[str, ...]
    rules: tuple[str, ...] = ()


_UPDATE = NestedParams(Wiring.SCALAR, ("update_jaxpr",))

# Instructions of Pallas kernels, which are inside of opaque jaxprs, are not listed.
TABLE: dict[str, NestedParams] = {
    "jit": NestedParams(Wiring.CALL, ("jaxpr",)),
    "call": NestedParams(Wiring.CALL, ("call_jaxpr",)),
    "closed_call": NestedParams(Wiring.CALL, ("call_jaxpr",)),
    "eval_jaxpr": NestedParams(Wiring.CALL, ("jaxpr", "call_jaxpr")),
    "remat2": NestedParams(Wiring.CALL, ("jaxpr",)),
    "custom_jvp_call": NestedParams(Wiring.CALL, ("call_jaxpr",), ("jvp_jaxpr_fun",)),
    "custom_vjp_call": NestedParams(Wiring.CALL, ("call_jaxpr",), ("fwd_jaxpr_thunk", "bwd")),
    "remat_opt": NestedParams(Wiring.CALL, ("fwd_jaxpr",), ("fun_jaxpr_thunk",)),
    "shard_map": NestedParams(Wiring.CALL, ("jaxpr",)),  # whose types are those of one device
    "composite": NestedParams(Wiring.UNIT, ("jaxpr", "call_jaxpr")),
    "compute_on": NestedParams(Wiring.UNIT, ("jaxpr",)),
    "custom_vmap_call": NestedParams(Wiring.UNIT, ("call",), ("rule",)),
    "fused_call": NestedParams(Wiring.UNIT, ("jaxpr",)),
    "program_order": NestedParams(Wiring.UNIT, ("call_jaxpr",)),
    "xla_metadata_call": NestedParams(Wiring.UNIT, ("jaxpr",)),
    "cond": NestedParams(Wiring.BRANCHES, ("branches",)),
    "scan": NestedParams(Wiring.SCAN, ("jaxpr",)),
    "while": NestedParams(Wiring.WHILE, ("cond_jaxpr", "body_jaxpr")),
    "reduce": NestedParams(Wiring.SCALAR, ("jaxpr",), ("computation",)),
    "reduce_window": NestedParams(Wiring.SCALAR, ("jaxpr",)),
    "scatter": _UPDATE,
    "scatter-add": _UPDATE,
    "scatter-sub": _UPDATE,
    "scatter-mul": _UPDATE,
    "scatter-max": _UPDATE,
    "scatter-min": _UPDATE,
    "select_and_scatter": NestedParams(Wiring.SCALAR, ("select_jaxpr", "scatter_jaxpr")),
    "custom_linear_solve": NestedParams(Wiring.OPAQUE, ("jaxprs",)),
    "custom_partitioning": NestedParams(Wiring.OPAQUE, ("call",)),
    "linear_call": NestedParams(Wiring.OPAQUE, ("callee",)),
    "run_state": NestedParams(Wiring.OPAQUE, ("jaxpr",)),
    "dot_product_attention_fwd": NestedParams(Wiring.OPAQUE, ("score_mod_jaxpr",)),
    "dot_product_attention_bwd": NestedParams(Wiring.OPAQUE, ("score_mod_jaxpr",)),
    "pallas_call": NestedParams(Wiring.OPAQUE, ("jaxpr",)),
    "core_map": NestedParams(Wiring.OPAQUE, ("jaxpr",)),
    "mpmd_map": NestedParams(Wiring.OPAQUE, ("jaxprs",)),
    "custom_fusion": NestedParams(Wiring.OPAQUE, ("jaxpr", "pallas_jaxpr")),
    "fusible": NestedParams(Wiring.OPAQUE, ("jaxpr",)),
    "cudnn_fusion": NestedParams(Wiring.OPAQUE, ("jaxpr",)),
    "thunky.call_thunky_nested": NestedParams(Wiring.OPAQUE, ("jaxpr",)),
}

# Primitives of others, once `register_op_kind` has described them: all parameters with jaxprs.
_DESCRIBED = {
    Trait.CALL: Wiring.CALL,
    Trait.MANUAL: Wiring.CALL,
    Trait.NESTED: Wiring.UNIT,
    Trait.BRANCH: Wiring.BRANCHES,
}


def wiring(eqn: JaxprEqn) -> Wiring | None:
    """Return how the jaxprs of an equation are wired; ``None`` for one that holds none.

    >>> import jax
    >>> [wiring(eqn) for eqn in jax.make_jaxpr(jax.jit(jax.numpy.sin))(1.0).eqns]
    [<Wiring.CALL: 'call'>]
    """
    found = _nested_params(eqn)
    return found.wiring if found else None


def nested(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """Return the jaxprs that an equation runs, in the order of their plans.

    Open ones are closed over no constants. Kernels and functions of reductions, which are not
    entered, are left out.

    >>> import jax
    >>> double_or_not = lambda x: jax.lax.cond(x > 0, lambda x: x, lambda x: 2 * x, x)
    >>> [len(nested(eqn)) for eqn in jax.make_jaxpr(double_or_not)(1.0).eqns]
    [0, 0, 2]
    """
    found = _nested_params(eqn)
    if found is None or found.wiring in _NOT_ENTERED:
        return []
    return [
        part if isinstance(part, ClosedJaxpr) else ClosedJaxpr(part, ())
        for name in found.params
        for part in _parts(eqn.params.get(name))
    ]


def called(eqn: JaxprEqn) -> ClosedJaxpr:
    """Return the one jaxpr of a call, checkpoint, mapped function or scan."""
    (body,) = nested(eqn)
    return body


def with_nested(eqn: JaxprEqn, bodies: Iterable[ClosedJaxpr]) -> dict[str, Any]:
    """Return the parameters that hold the jaxprs of an equation, with others in their place.

    Args:
      eqn: the equation.
      bodies: as many as ``nested`` returns. Each is put back closed or open, as the one before it;
        where that is open and the new one has constants, the one before stays.

    >>> import jax
    >>> (eqn,) = jax.make_jaxpr(jax.jit(jax.numpy.sin))(1.0).eqns
    >>> with_nested(eqn, [jax.make_jaxpr(jax.numpy.cos)(1.0)])["jaxpr"].eqns[0].primitive
    cos
    """
    found = _nested_params(eqn)
    if found is None or found.wiring in _NOT_ENTERED:
        return {}
    remaining = iter(bodies)
    return {n: _put(eqn.params[n], remaining) for n in found.params if n in eqn.params}


@dataclass(frozen=True, slots=True)
class Loop:
    """A scan or while loop.

    Attributes:
      test: whether there is another iteration; ``None`` for a scan.
      body: one iteration.
      test_invariants: how many operands the test reads in every iteration.
      invariants: how many operands the body reads in every iteration.
      carries: how many values one iteration hands to the next.
      trips: how many iterations there are; ``None`` where only running the loop tells.
    """

    test: ClosedJaxpr | None
    body: ClosedJaxpr
    test_invariants: int
    invariants: int
    carries: int
    trips: int | None

    @property
    def keeps_carries(self) -> bool:
        """True if carries keep their dtype: that of a while loop decides when the loop ends."""
        return self.test is not None

    def parts(self, values: Sequence[Any]) -> tuple[Sequence[Any], ...]:
        """Split one value per operand into test invariants, invariants, carries and sliced."""
        first, second = self.test_invariants, self.test_invariants + self.invariants
        third = second + self.carries
        return values[:first], values[first:second], values[second:third], values[third:]


def loop(eqn: JaxprEqn) -> Loop:
    """Return the wiring of a scan or while equation."""
    if wiring(eqn) is Wiring.WHILE:
        test, body = nested(eqn)
        tests, invariants = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        return Loop(test, body, tests, invariants, len(body.jaxpr.outvars), None)
    return Loop(None, called(eqn), 0, *jax_compat.scan_layout(eqn), eqn.params["length"])


def is_open(eqn: JaxprEqn) -> bool:
    """Return whether an equation holds open jaxprs, which have no constants.

    From JAX 0.12 on the two types are one, which has constants; but that of a checkpoint may not.
    """
    found = _nested_params(eqn)
    inside = [eqn.params.get(name) for name in found.params] if found else []
    is_open_type = any(isinstance(j, Jaxpr) and not isinstance(j, ClosedJaxpr) for j in inside)
    return is_open_type or eqn.primitive.name == "remat2"


def is_region(eqn: JaxprEqn) -> bool:
    """Return whether an inner ``amp`` has already rewritten what this call holds."""
    return str(eqn.params.get("name", "")).startswith(REGION_PREFIX)


_NOT_ENTERED = (Wiring.SCALAR, Wiring.OPAQUE)


def _nested_params(eqn: JaxprEqn) -> NestedParams | None:
    name = eqn.primitive.name
    if name in taxonomy.TABLE:
        return TABLE.get(name)
    op = taxonomy.lookup(name)
    described = _DESCRIBED.get(op.trait) if op else None
    if described is None:
        return None
    return NestedParams(described, tuple(k for k, v in eqn.params.items() if next(_parts(v), None)))


def _parts(param: Any) -> Iterator[Jaxpr | ClosedJaxpr]:
    """Yield the jaxprs of a parameter."""
    for part in param if isinstance(param, tuple) else (param,):
        if isinstance(part, Jaxpr | ClosedJaxpr):
            yield part


def _put(param: Any, bodies: Iterator[ClosedJaxpr]) -> Any:
    if isinstance(param, tuple):
        return tuple(_put(part, bodies) for part in param)
    body = next(bodies)
    if isinstance(param, ClosedJaxpr):
        return body
    return param if body.consts else body.jaxpr
