"""Programs of many fields lose no more than rounding their products costs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.fields import measure, neighbours, random
from tests.fields.known import CAUSES, DRAWS, KNOWN, UNSCALED
from tests.fields.oracle import Oracle, evaluated
from tests.fields.registry import FIELD_PROGRAMS
from tests.fields.report import Row, surprises

SAMPLE = ("river_level", "hyperparameters")
"""What `make test` runs: two programs in four ways each."""


def _rounding(fn, policy=None):
    """A transform that rounds what it is given."""
    return lambda *args: fn(*jax.tree.map(lambda x: jnp.asarray(x, "bfloat16") * 1.0, args))


def _marked() -> list[object]:
    return [
        pytest.param(name, id=str(p), marks=() if name in SAMPLE else pytest.mark.long)
        for name, p in FIELD_PROGRAMS.items()
    ]


def test_there_are_enough_programs() -> None:
    assert len(FIELD_PROGRAMS) >= 150
    assert len({p.field for p in FIELD_PROGRAMS.values()}) >= 15
    assert sum(p.aux for p in FIELD_PROGRAMS.values()) >= 100


@pytest.mark.parametrize("name", _marked())
def test_errors_are_those_of_rounded_products(name: str) -> None:
    """What fails is listed, and what is listed fails."""
    assert not surprises(measure.rows(name))
    measure.expected.cache_clear()


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, marks=() if run == "planar_flow f16 amp(grad)" else pytest.mark.long)
        for run in KNOWN[DRAWS]
    ],
)
def test_unlucky_draws_hold_in_the_median(run: str) -> None:
    """What is listed as one draw loses no more than rounded products do for most arguments."""
    outcome = neighbours.measured(*run.split(" "), count=16)
    assert not outcome.wrong, outcome.worst
    assert outcome.undecided < len(outcome.leaves)


@pytest.mark.long
@pytest.mark.parametrize("run", KNOWN[UNSCALED])
def test_a_loss_scale_is_what_unscaled_runs_lack(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, low, order = run.split(" ")
    program = FIELD_PROGRAMS[name]

    def scaled(*args: Any) -> Any:
        loss, auxiliary = program.fn(*args)
        return 1024 * loss, auxiliary

    monkeypatch.setitem(FIELD_PROGRAMS, name, dataclasses.replace(program, fn=scaled))
    measure.expected.cache_clear()
    assert not measure.measured(name, low, order).wrong
    measure.expected.cache_clear()


def test_a_loss_in_the_median_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transform that rounds what the program is given fails for most arguments."""
    monkeypatch.setattr(measure, "amp", _rounding)
    assert neighbours.measured("river_level", "bf16", "amp(grad)", count=3).wrong


def test_listed_runs_exist() -> None:
    runs = {f"{n} {low} {order}" for n in FIELD_PROGRAMS for low, order in measure.cases(n)}
    listed = [run for of_cause in KNOWN.values() for run in of_cause]
    assert set(listed) <= runs
    assert len(set(listed)) == len(listed)
    assert set(KNOWN) == set(CAUSES)


def test_a_wrong_run_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transform that rounds what the program is given fails where differences matter."""
    monkeypatch.setattr(measure, "amp", _rounding)
    assert measure.measured("river_level", "bf16", "amp(grad)").wrong


def test_surprises_are_both_ways() -> None:
    """A failure that is not listed, and a listed run that passes."""
    row = Row("river_level", "bf16", "amp(grad)", True, "", 1.0, 0.0, 1, 0)
    assert len(surprises([row])) == 1
    for run in [run for runs in KNOWN.values() for run in runs][:1]:
        name, low, order = run.split(" ")
        assert len(surprises([Row(name, low, order, False, "", 0.0, 0.0, 1, 0)])) == 1


def _nested(x: jax.Array, w: jax.Array) -> jax.Array:
    """Products in a loop, a branch and a rematerialized function, and a random draw."""
    h = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=2)[0]
    h = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ w), (0, h))[1]
    h = jax.checkpoint(lambda h: h @ w)(h) + jax.random.normal(jax.random.key(0), h.shape)
    return jax.lax.cond(h.sum() > -1e9, lambda h: h @ w, lambda h: h, h)


def test_the_oracle_is_the_program() -> None:
    """Without rounding it gives what JAX gives; in float64 it is nearly that."""
    x, w = np.random.default_rng(0).normal(size=(2, 6, 6)).astype(np.float32)
    narrow, wide = evaluated(_nested, (x, w), [Oracle(np.float32), Oracle(np.float64)])
    assert wide.dtype == np.float64
    np.testing.assert_allclose(narrow, jax.jit(_nested)(x, w), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(wide, narrow, rtol=1e-4, atol=1e-4)
    assert np.abs(wide - narrow).max() > 0


@pytest.mark.parametrize("low", measure.LOW)
def test_the_oracle_rounds_products_alone(low: str) -> None:
    dtype = measure.LOW[low]
    x, w = np.random.default_rng(1).normal(size=(2, 8, 8)).astype(np.float32)
    (got,) = evaluated(lambda x, w: jnp.exp(x) @ w + x, (x, w), [Oracle(np.float64, dtype)])

    def rounded(a: np.ndarray) -> np.ndarray:
        return np.asarray(jnp.asarray(a).astype(dtype)).astype(np.float64)

    want = rounded(rounded(np.exp(x.astype(np.float64))) @ rounded(w)) + x
    np.testing.assert_allclose(got, want, rtol=1e-3 if low == "f16" else 1e-2)
    assert np.abs(got - (np.exp(x) @ w + x)).max() > 1e-3


HELD = (
    random.Drawn("sum", 1500.0, returned=True, low="bf16", order="amp(grad)"),
    random.Drawn("increments", 1e4, turns=4, loop="scan", low="f16", order="grad(amp)"),
    random.Drawn("interpolated", 288.0, read="norm", low="bf16", order="amp"),
)


@pytest.mark.parametrize("drawn", HELD, ids=lambda drawn: drawn.shape)
def test_offsets_do_not_swallow_differences(drawn: random.Drawn) -> None:
    """A program of each shape; `python -m tests.conformance --offsets` draws thousands."""
    random.check(drawn)


def test_a_swallowed_difference_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transform that rounds what it is given fails the check of random programs."""
    monkeypatch.setattr(measure, "amp", _rounding)
    with pytest.raises(AssertionError):
        random.check(HELD[0])
