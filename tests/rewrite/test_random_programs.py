"""Random programs keep the invariants of the rewriting."""

from __future__ import annotations

import jax
import pytest
from hypothesis import given, settings

from jaxamp import amp
from jaxamp.core.taxonomy import lookup
from tests import audit, random_programs
from tests.random_programs import BINARY, DRAWN, NESTED, UNARY, Steps


@settings(DRAWN, max_examples=3, derandomize=True)  # `make test-long` draws 200
@given(random_programs.programs())
def test_random_program_keeps_the_invariants(steps: Steps) -> None:
    """Types, finiteness, a valid jaxpr, determinism, the forced identity bit for bit."""
    random_programs.check(steps)


def test_programs_are_drawn_from_the_table() -> None:
    """The steps hold at least thirty primitives, and the table knows all of them."""
    step = (("dot", 0, 1, ()),)
    flat = [((name, 0, 1, ()),) for name in [*UNARY, *BINARY]]
    nested = [((name, 0, 1, (step, step)),) for name in NESTED]
    found = {
        name
        for steps in [*flat, *nested]
        for name in random_programs.primitives(
            random_programs.program(steps), *random_programs.arguments()
        )
    }
    assert len(found) >= 30
    assert {name for name in found if lookup(name) is None} == set()
    assert {"cond", "scan", "while", "jit", "remat2", "custom_jvp_call"} <= found | _renamed(found)


def _renamed(found: set[str]) -> set[str]:
    """`jax.checkpoint` is called `checkpoint` or `remat2` by different releases."""
    return {"remat2"} if {"checkpoint", "remat"} & found else set()


@pytest.mark.product("name", every=9)
@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_step_on_a_product_keeps_the_invariants(name: str) -> None:
    """Each step alone, with a product before and after it."""
    steps = (("dot", 0, 1, ()), (name, 2, 1, ()), ("dot", 3, 0, ()))
    random_programs.check(steps, ("auto_mixed_bf16",))
    jaxpr = jax.make_jaxpr(amp(random_programs.program(steps)))(*random_programs.arguments())
    assert any(p.is_low for p in audit.products(jaxpr.jaxpr))


@pytest.mark.product("outer", every=2)
@pytest.mark.parametrize("outer", NESTED)
@pytest.mark.parametrize("inner", NESTED)
def test_nesting_of_two_keeps_the_invariants(outer: str, inner: str) -> None:
    """Every higher-order step inside every other."""
    leaf = (("dot", 0, 1, ()), ("tanh", 2, 0, ()))
    body = ((inner, 0, 1, (leaf, leaf)),)
    random_programs.check(((outer, 0, 1, (body, leaf)),), ("auto_mixed_bf16",))


def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks are not empty: a transform that rounds outputs to bfloat16 fails them."""

    def rounding(fn, policy=None):
        return lambda *args: jax.tree.map(lambda y: y.astype("bfloat16"), fn(*args))

    monkeypatch.setattr(random_programs, "amp", rounding)
    with pytest.raises(AssertionError):
        random_programs.check((("dot", 0, 1, ()),))
