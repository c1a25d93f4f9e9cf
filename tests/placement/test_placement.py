"""Where values are stored narrow: the plan beside TensorFlow's painting and a minimum cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxamp.core.formats import Precision
from jaxamp.plan import planner
from jaxamp.plan.graph.graph import Role
from jaxamp.plan.precision import choose
from tests import random_programs
from tests.placement.brute import cheapest
from tests.placement.checks import (
    ABOVE,
    BOUND,
    POLICIES,
    check_case,
    check_random,
    is_explained,
)
from tests.placement.compare import Comparison, compare
from tests.placement.corpus import CASES, GRADIENT
from tests.placement.cost import cost, stored_bytes
from tests.placement.cut import cut
from tests.placement.problem import NARROW, WIDE, Problem
from tests.random_programs import DRAWN, Steps

POLICY = POLICIES[0]
MOST_FREE = 10  # labels; brute force tries two to the power of these

LABELS = st.integers(0, 8)
PAIRS = st.lists(st.tuples(st.integers(2, 8), LABELS), max_size=12).map(tuple)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Problems of seven labels beside the two formats."""
    sizes = draw(st.lists(st.integers(0, 300), min_size=7, max_size=7))
    some = st.frozensets(st.integers(2, 8), max_size=3)
    own = st.integers(2, 8)
    return Problem(
        elements=(0, 0, *sizes),
        given=draw(some),
        pinned=draw(some),
        equal=tuple(draw(st.lists(st.tuples(own, own), max_size=2))),
        stored=draw(PAIRS),
        fused=draw(PAIRS),
    )


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(problems())
def test_the_cut_is_as_cheap_as_the_cheapest_labelling(problem: Problem) -> None:
    labels = cut(problem)
    assert problem.allows(labels)
    assert cost(problem, labels) == cheapest(problem)


@pytest.mark.parametrize(
    ("stored", "pinned", "expected"),
    [
        pytest.param(((2, 2), (2, NARROW)), (), 2, id="read by a product"),
        pytest.param(((2, 2), (2, WIDE)), (), 4, id="a result"),
        pytest.param(((2, 2), (2, NARROW), (2, WIDE)), (), 6, id="both, each once"),
        pytest.param(((2, 2), (2, NARROW), (2, NARROW)), (2,), 6, id="pinned, cast once"),
    ],
)
def test_a_value_costs_each_format_once(stored: Any, pinned: Any, expected: int) -> None:
    problem = Problem((0, 0, 1), frozenset(), frozenset(pinned), (), stored, ())
    assert stored_bytes(problem, cut(problem)) == expected


def test_a_carry_is_cast_where_that_is_cheapest() -> None:
    """Ten elements each: an initial value that has to be wide, and a body that a product reads."""
    init, carry, body = 2, 3, 4
    stored = ((init, carry), (carry, carry), (body, carry), (body, NARROW))
    problem = Problem(
        (0, 0, 10, 10, 10), frozenset({init}), frozenset({init}), (), stored, ((init, carry),)
    )
    assert cut(problem) == [False, True, True, False, False]
    assert stored_bytes(problem, cut(problem)) == 3 * 20


def mlp(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) @ w


def attention(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.nn.softmax((x @ w) @ x.T) @ x


def streamed(x: jax.Array, w: jax.Array) -> jax.Array:
    hidden, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x @ w, jnp.stack([w, w]))
    return hidden @ w


def nested_loops(x: jax.Array, w: jax.Array) -> jax.Array:
    """The gradient reads what the inner loop stacks in a loop of a loop."""

    def layer(h: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        return h, (h @ jnp.broadcast_to(row, h.shape))[0]

    def outer(h: jax.Array, _: jax.Array) -> tuple[jax.Array, jax.Array]:
        last, rows = jax.lax.scan(layer, h, w)
        return last + rows, h

    return jax.lax.scan(outer, x, w)[0]


def dropped_reader(x: jax.Array, w: jax.Array) -> jax.Array:
    """What the branches give is read by a product, and by what nobody reads."""
    chosen = jax.lax.cond(x[0, 0] > 0, jnp.negative, jnp.abs, x)
    jnp.fft.fft(chosen)
    return chosen @ w


def dropped_product(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A result, which is in memory in float32, for a loop too: the product of it is not needed."""
    hidden = jnp.tanh(x @ w)
    hidden @ w
    return hidden, jax.lax.scan(lambda c, _: (c + jnp.sin(hidden), None), x, length=2)[0]


def running_maximum(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """It reads memory, in which a sum finds nothing: it is fused with what makes its summands."""
    hidden = jnp.clip(x @ w, -8.0, 8.0)
    return jax.lax.cummax(hidden) @ w, hidden.sum()


SMALL: dict[str, Callable[..., Any]] = {
    "mlp": mlp,
    "attention": attention,
    "streamed": streamed,
    "dropped reader": dropped_reader,
    "dropped product": dropped_product,
    "running maximum": running_maximum,
    "gradient of nested loops": jax.grad(lambda x, w: (nested_loops(x, w) ** 2).mean(), 1),
    "gradient of mlp": jax.grad(lambda x, w: mlp(x, w).sum(), 1),
    "gradient of streamed": jax.grad(lambda x, w: (streamed(x, w) ** 2).mean(), 1),
}


def square() -> tuple[jax.Array, jax.Array]:
    return jnp.ones((8, 8)), jnp.ones((8, 8))


@pytest.mark.parametrize("name", SMALL)
def test_plans_of_small_programs_are_optimal(name: str) -> None:
    """So says brute force over all labellings, where these are few enough."""
    found = compare(SMALL[name], square(), POLICY)
    found.check()
    assert found.bytes(found.planned) == found.bytes(found.best)
    if len(found.problem.free) <= MOST_FREE:
        assert cost(found.problem, found.best) == cheapest(found.problem)


def test_a_known_program_stores_what_one_counts_by_hand() -> None:
    """The operands narrow, one array between, the result wide: of 64 elements each."""
    found = compare(mlp, square(), POLICY)
    assert found.bytes(found.best) == 64 * (2 + 2 + 2 + 2 + 4)


def test_the_painting_paints_what_lies_between_products() -> None:
    """It is an honest opponent: equal to the best here, and better than nothing painted."""
    found = compare(mlp, square(), POLICY)
    assert found.painted == found.best
    everything = [label != NARROW for label in range(len(found.problem.elements))]
    assert found.bytes(everything) > found.bytes(found.painted)


def test_the_painting_floods_from_what_is_kept() -> None:
    """After a statistic it paints nothing; the plan rounds what waits behind it."""

    def normed(x: jax.Array, w: jax.Array) -> jax.Array:
        hidden = x @ w
        layer = jax.jit(lambda h: jnp.tanh(h @ w))
        centred = hidden - hidden.mean(-1, keepdims=True)
        return (centred + layer(centred)) @ w

    found = compare(normed, square(), POLICY)
    assert found.bytes(found.planned) < found.bytes(found.painted)


SAMPLE = CASES[::13]


@pytest.mark.parametrize(("name", "transform"), SAMPLE, ids=map("-".join, SAMPLE))
def test_a_plan_stores_no_more_than_the_painting(name: str, transform: str) -> None:
    """And nothing that the guards do not explain; brute force confirms the cut where it can."""
    found = check_case(name, transform, POLICY)
    if len(found.problem.free) <= MOST_FREE:
        assert cost(found.problem, found.best) == cheapest(found.problem)


@pytest.mark.parametrize("name", sorted(name for name, _ in ABOVE))
def test_what_is_stored_in_excess_is_known(name: str) -> None:
    found = check_case(name, GRADIENT, POLICY)
    assert not is_explained(found)
    assert 1 < found.excess <= BOUND


# `python -m tests.conformance --placement` draws 1000.
@settings(DRAWN, max_examples=4, derandomize=True)
@given(random_programs.programs())
def test_plans_of_random_programs_store_little_more_than_the_best(steps: Steps) -> None:
    check_random(steps, POLICY)


def _is_noticed(found: Comparison) -> bool:
    try:
        found.check()
    except AssertionError:
        return True
    return found.bytes(found.planned) > found.bytes(found.gainful)


def test_any_value_that_is_stored_wide_instead_is_noticed() -> None:
    """Each free label of a plan that is narrow, made wide: a residual, an operand, a carry."""
    found = compare(SMALL["gradient of streamed"], square(), POLICY)
    problem, of = found.problem, found.problem.representatives()
    stored = {of[label] for value, label in problem.stored if problem.elements[value]}
    narrow = [label for label in problem.free if label in stored and not found.planned[label]]
    assert len(narrow) >= 5
    for label in narrow:
        wide = {of[label] for label, is_wide in enumerate(found.planned) if is_wide}
        labels = problem.spread([*wide, label])
        assert found.bytes(labels) > found.bytes(found.best)


def _without_streams(real: Any) -> Any:
    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        self.narrow_carries = set()

    return init


def _products_emit_f32(real: Any) -> Any:
    def chosen(self: Any, node: Any, *args: Any) -> Any:
        choice = real(self, node, *args)
        is_product = node.role is Role.CONTRACT
        return choice._replace(stored=Precision.F32) if is_product else choice

    return chosen


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any], Callable[..., Any]]] = {
    "products emit float32": (choose.Chooser, "_choose", _products_emit_f32, attention),
    "carries stay float32": (choose.Chooser, "__init__", _without_streams, streamed),
    "stacks stay float32": (
        *(planner, "narrow_buffers", lambda real: lambda *args: None),
        SMALL["gradient of streamed"],
    ),
    "nothing is copied": (
        *(choose.Chooser, "_is_copied", lambda real: lambda *args: False),
        running_maximum,
    ),
}
"""What is broken in the planner, how, and a program in which it shows."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planner_that_places_worse_is_noticed(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, attribute, wrap, program = FAULTS[fault]
    assert not _is_noticed(compare(program, square(), POLICY))
    monkeypatch.setattr(owner, attribute, wrap(getattr(owner, attribute)))
    assert _is_noticed(compare(program, square(), POLICY))
