"""Jaxprs inside equations, and how they are wired.

The trait of a primitive says whether they are entered. Everything that descends into a program goes
through ``nested``, and everything that changes one goes back through ``with_nested``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxamp.core import jax_compat, taxonomy
from jaxamp.core.enum_words import Word
from jaxamp.core.taxonomy import Trait

REGION_PREFIX = "jaxamp_region"  # name of the jit that holds what `amp` has already rewritten
RULED = frozenset({"custom_jvp_call", "custom_vjp_call"})  # have derivatives of their own


class Wiring(Word):
    """Correspondence of a nested jaxpr's inputs and outputs with operands and results.

    Kernels, functions of scalars such as that of a reduction, and what other code runs have none.
    """

    CALL = "call"  # inputs are the operands, outputs the results
    UNIT = "unit"  # as CALL, but a compiler may replace the whole: its signature is fixed
    BRANCHES = "branches"  # operand 0 chooses one jaxpr, which takes the other operands
    SCAN = "scan"  # operands: invariants, initial carries, sliced arrays; results: carries, stacks
    WHILE = "while"  # operands: invariants of the test, those of the body, initial carries


_WIRINGS = {
    Trait.CALL: Wiring.CALL,
    Trait.MANUAL: Wiring.CALL,  # whose types are those of one device
    Trait.NESTED: Wiring.UNIT,
    Trait.BRANCH: Wiring.BRANCHES,
}
_OF_JAX = {n: _WIRINGS[op.trait] for n, op in taxonomy.TABLE.items() if op.trait in _WIRINGS}
_OF_JAX |= {"scan": Wiring.SCAN, "while": Wiring.WHILE}


def wiring(eqn: JaxprEqn) -> Wiring | None:
    """Return how the jaxprs of an equation are wired; ``None`` for one that holds none to enter.

    >>> import jax
    >>> [wiring(eqn) for eqn in jax.make_jaxpr(jax.jit(jax.numpy.sin))(1.0).eqns]
    [<Wiring.CALL: 'call'>]
    """
    name = eqn.primitive.name
    if name in taxonomy.TABLE:
        return _OF_JAX.get(name)
    op = taxonomy.lookup(name)
    return _WIRINGS.get(op.trait) if op else None


def nested(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """Return the jaxprs that an equation runs, in the order of their plans.

    Open ones are closed over no constants. Those that are not entered are left out.

    >>> import jax
    >>> double_or_not = lambda x: jax.lax.cond(x > 0, lambda x: x, lambda x: 2 * x, x)
    >>> [len(nested(eqn)) for eqn in jax.make_jaxpr(double_or_not)(1.0).eqns]
    [0, 0, 2]
    """
    if wiring(eqn) is None:
        return []
    return [
        part if isinstance(part, ClosedJaxpr) else ClosedJaxpr(part, ())
        for _, parts in _held(eqn)
        for part in parts
    ]


def called(eqn: JaxprEqn) -> ClosedJaxpr:
    """Return the one jaxpr of a call, checkpoint, mapped function or scan."""
    (body,) = nested(eqn)
    return body


def with_nested(eqn: JaxprEqn, bodies: Iterable[ClosedJaxpr]) -> dict[str, Any]:
    """Return the parameters that hold the jaxprs of an equation, with as many in their place.

    Each is put back closed or open, as the one before it; where that is open and the new one has
    constants, the one before stays.

    >>> import jax
    >>> (eqn,) = jax.make_jaxpr(jax.jit(jax.numpy.sin))(1.0).eqns
    >>> with_nested(eqn, [jax.make_jaxpr(jax.numpy.cos)(1.0)])["jaxpr"].eqns[0].primitive
    cos
    """
    if wiring(eqn) is None:
        return {}
    remaining = iter(bodies)
    return {name: _put(eqn.params[name], remaining) for name, _ in _held(eqn)}


def changed_inside(eqn: JaxprEqn, change: Callable[[ClosedJaxpr], ClosedJaxpr]) -> JaxprEqn:
    """Return an equation with its jaxprs changed; itself where all stay the same objects."""
    bodies = nested(eqn)
    changed = list(map(change, bodies))
    if all(map(operator.is_, changed, bodies)):
        return eqn
    return eqn.replace(params={**eqn.params, **with_nested(eqn, changed)})


@dataclass(frozen=True, slots=True)
class Loop:
    """A scan or while loop, and how many operands of each kind it has."""

    test: ClosedJaxpr | None  # whether there is another iteration; none for a scan
    body: ClosedJaxpr
    test_invariants: int  # which the test reads in every iteration
    invariants: int  # which the body does
    carries: int  # which one iteration hands to the next
    trips: int | None  # how many iterations there are; None where only running the loop tells

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
    inside = (part for _, parts in _held(eqn) for part in parts)
    is_open_type = any(not isinstance(part, ClosedJaxpr) for part in inside)
    return is_open_type or eqn.primitive.name == "remat2"


def is_region(eqn: JaxprEqn) -> bool:
    """Return whether an inner ``amp`` has already rewritten what this call holds."""
    return str(eqn.params.get("name", "")).startswith(REGION_PREFIX)


_JAXPRS = (Jaxpr, ClosedJaxpr)


def _held(eqn: JaxprEqn) -> Iterator[tuple[str, list[Jaxpr | ClosedJaxpr]]]:
    """Yield the parameters of an equation that hold jaxprs, with those."""
    for name, param in eqn.params.items():
        parts = param if isinstance(param, tuple) else (param,)
        if held := [part for part in parts if isinstance(part, _JAXPRS)]:
            yield name, held


def _put(param: Any, bodies: Iterator[ClosedJaxpr]) -> Any:
    if isinstance(param, tuple):
        return tuple(_put(part, bodies) for part in param)
    body = next(bodies)
    if isinstance(param, ClosedJaxpr):
        return body
    return param if body.consts else body.jaxpr
