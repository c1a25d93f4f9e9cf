"""The table of nested jaxprs is complete for the installed JAX, and its wiring is that of JAX."""

import functools
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxamp.core import taxonomy
from jaxamp.core.taxonomy import Trait
from jaxamp.jaxprs.nested import Wiring, loop, nested, wiring, with_nested
from tests import table_programs

# Their types are those of one device, or they take what another one closes over.
_RETYPED = frozenset({"shard_map"})


def holds_jaxprs(value: Any) -> bool:
    """Whether a parameter is a jaxpr, or a tuple with one."""
    if isinstance(value, tuple):
        return any(map(holds_jaxprs, value))
    return isinstance(value, Jaxpr | ClosedJaxpr)


def walk(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation that can be reached through the table."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in nested(eqn):
            yield from walk(body.jaxpr)


@functools.cache
def equations() -> list[JaxprEqn]:
    """The equations with jaxprs of programs that reach nearly all primitives."""
    closed = [jax.make_jaxpr(fn)(*args) for fn, args in table_programs.PROGRAMS.values()]
    found = (eqn for program in closed for eqn in walk(program.jaxpr))
    return [eqn for eqn in found if any(map(holds_jaxprs, eqn.params.values()))]


def types(atoms: Any) -> list[tuple[Any, Any]]:
    """Shape and dtype of each atom."""
    return [(getattr(a.aval, "shape", ()), getattr(a.aval, "dtype", None)) for a in atoms]


def test_every_primitive_of_jax_that_carries_jaxprs_is_in_the_table():
    """By the signatures of JAX's own rules; instructions of kernels are inside of opaque jaxprs."""
    command = [sys.executable, "-m", "tests.primitive_census"]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    carriers: dict[str, list[str]] = json.loads(done.stdout)["carriers"]
    assert {"jit", "scan", "while", "cond", "remat2", "reduce", "pallas_call"} <= carriers.keys()
    missing = {
        name: unknown
        for name, params in carriers.items()
        if (op := taxonomy.TABLE.get(name)) is None or op.trait is not Trait.KERNEL
        if (unknown := [p for p in params if p not in known(name)])
    }
    assert not missing, f"JAX {jax.__version__} has jaxprs that the table does not know: {missing}"


def known(name: str) -> tuple[str, ...]:
    """The parameters of a primitive that the table names."""
    op = taxonomy.TABLE.get(name)
    return op.dtype_params if op else ()


def test_every_parameter_that_holds_a_jaxpr_is_in_the_table():
    """What programs hold, beside what signatures say."""
    assert len({eqn.primitive for eqn in equations()}) > 12
    for eqn in equations():
        held = {name for name, value in eqn.params.items() if holds_jaxprs(value)}
        assert held <= set(known(eqn.primitive.name)), eqn.primitive


def test_jaxprs_go_back_as_they_were():
    for eqn in equations():
        if wiring(eqn) is None:
            assert not nested(eqn)
        for name, value in with_nested(eqn, nested(eqn)).items():
            assert value == eqn.params[name]


def test_jaxprs_are_wired_as_the_table_says():
    """Operands and results have the types of what they are handed to and taken from."""
    seen = set()
    for eqn in equations():
        if eqn.primitive.name in _RETYPED:
            continue
        seen.add(wiring(eqn))
        match wiring(eqn):
            case Wiring.CALL | Wiring.UNIT:
                for body in nested(eqn):
                    assert types(body.jaxpr.invars) == types(eqn.invars)
                    assert types(body.jaxpr.outvars) == types(eqn.outvars)
            case Wiring.BRANCHES:
                for body in nested(eqn):
                    assert types(body.jaxpr.invars) == types(eqn.invars[1:])
                    assert types(body.jaxpr.outvars) == types(eqn.outvars)
            case Wiring.SCAN | Wiring.WHILE:
                wired = loop(eqn)
                tested, invariants, carries, _ = map(types, wired.parts(eqn.invars))
                ahead = [*invariants, *carries]
                assert types(wired.body.jaxpr.invars)[: len(ahead)] == ahead
                assert types(wired.body.jaxpr.outvars)[: wired.carries] == carries
                if wired.test:
                    assert types(wired.test.jaxpr.invars) == [*tested, *carries]
    assert {Wiring.CALL, Wiring.UNIT, Wiring.BRANCHES, Wiring.SCAN, Wiring.WHILE} <= seen


@pytest.mark.parametrize("trait", ["call", "nested", "branch", "opaque"])
def test_primitives_of_others_hold_what_their_trait_says(trait):
    primitive = jax.extend.core.Primitive(f"described_as_{trait}")
    primitive.def_abstract_eval(lambda *avals, **_: avals[-1])
    taxonomy.register_op_kind(primitive, "Boundary", trait=trait)
    body = jax.make_jaxpr(jnp.sin)(1.0)
    bodies = (body, body) if trait == "branch" else body
    closed = jax.make_jaxpr(lambda x: primitive.bind(x, program=bodies, times=3))(1.0)
    count = {"branch": 2, "opaque": 0}.get(trait, 1)
    assert nested(closed.jaxpr.eqns[0]) == [body] * count
