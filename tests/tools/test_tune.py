"""``tune``: budgets are kept cheaply, answers repeat, interrupted searches go on."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxamp
from jaxamp import PrecisionPolicy
from jaxamp.tools.tune import tune
from jaxamp.tools.tune.problem import Problem
from jaxamp.tools.tune.search import Search, cheapest
from jaxamp.tools.tune.sensitivity import predicted


def fragile(x, a, b, w):
    """A difference of products by two arguments that are nearly equal, beside a harmless product.

    No plan can know that they are.
    """
    with jax.named_scope("cancelling"):
        small = (x @ a - x @ b) * 1e2
    with jax.named_scope("harmless"):
        return small + jnp.tanh(x @ w) @ w.T


def arguments(seed):
    """Data of a seed, with the same weights."""
    a, b, w = (0.25 * jax.random.normal(jax.random.key(i), (16, 16)) for i in (1, 2, 3))
    return jax.random.normal(jax.random.key(seed + 100), (32, 16)), a, a + 1e-2 * b, w


@pytest.fixture(scope="module")
def tuned():
    """A tuning of the fragile program."""
    return tune(fragile, arguments(0), budget=5e-3)


def test_the_fragile_part_stays_in_f32(tuned):
    """What cancels is raised, what does not is lowered, and the budget holds on fresh data."""
    assert tuned.error <= tuned.budget
    assert tuned.cost < tuned.cost_f32
    low = {(v.group.scope, v.group.kind): v.low for v in tuned.verdicts}
    assert not low["cancelling", "Compute"]
    assert low["harmless", "Compute"]
    fresh = arguments(1)
    exact = np.asarray(fragile(*fresh))
    result = np.asarray(jaxamp.amp(fragile, tuned.policy)(*fresh))
    assert np.linalg.norm(result - exact) <= tuned.budget * np.linalg.norm(exact)
    plain = np.asarray(jaxamp.amp(fragile)(*fresh))
    assert np.linalg.norm(plain - exact) > 10 * tuned.budget * np.linalg.norm(exact)


def test_products_of_8_bits_take_half_the_time_of_16():
    """What quantizing a large product saves is priced by the rate of its format."""
    x = jnp.ones((2048, 2048))
    of_16, of_8 = (
        Problem.of(jnp.dot, policy, (x, x), None).gains().sum()
        for policy in ("mixed_bf16", "fp8_current")
    )
    assert of_8 > 1.2 * of_16


def test_a_part_beyond_the_format_spoils_no_other():
    """What float16 has no number for stays float32, and the product that it scales does not."""

    def fn(x, w):
        with jax.named_scope("large"):
            large = (1e4 * x) @ w @ w
        with jax.named_scope("small"):
            return 1e-5 * large * (jnp.tanh(x @ w) @ w)

    x, _, _, w = arguments(0)
    found = tune(fn, (x, 4 * w), budget=1e-2, policy="mixed_f16", max_runs=2)
    low = {(v.group.scope, v.group.kind): v.low for v in found.verdicts}
    assert (low["large", "Compute"], low["small", "Compute"]) == (False, True)


def test_a_product_that_jax_cannot_map():
    """Effects of roundings come out of one backward pass, in which a ragged product is."""

    def fn(x, w):
        return jnp.tanh(jax.lax.ragged_dot(x, w, jnp.array([3, 5], jnp.int32))) @ w[0]

    keys = jax.random.split(jax.random.key(0))
    args = jax.random.normal(keys[0], (8, 16)), jax.random.normal(keys[1], (2, 16, 16))
    found = tune(fn, args, budget=1e-1, max_runs=2)
    assert {v.low for v in found.verdicts} == {True}


def test_the_policy_is_json_with_scopes_and_reasons(tuned):
    """The policy can be stored, read, edited and used."""
    data = json.loads(tuned.to_json())
    policy = PrecisionPolicy.from_json(json.dumps(data["policy"]))
    assert policy == tuned.policy
    assert any(rule["scope"] == "/cancelling/" for rule in data["policy"]["rules"])
    assert all("predicted error" in rule["label"] for rule in data["policy"]["rules"])
    assert not jaxamp.plan_of(fragile, policy)(*arguments(0)).unmatched_rules


def test_an_interrupted_search_goes_on(tuned, tmp_path):
    """What was measured is not measured again, and the answer is that of an uninterrupted one."""
    state = tmp_path / "state.json"
    tune(fragile, arguments(0), budget=5e-3, max_runs=2, state=state)
    known = len(json.loads(state.read_text())["errors"])
    again = tune(fragile, arguments(0), budget=5e-3, state=state)
    assert 1 <= known <= again.runs <= 30
    assert again.policy == tuned.policy


def test_an_interrupt_loses_no_run(tmp_path):
    """A search that is interrupted goes on with the next run, and comes to the same end."""

    def chained(x):
        for name in ("one", "two"):
            with jax.named_scope(name):
                x = jnp.tanh(x @ x)
        return x @ x

    asked = []

    def worst(result, exact):
        if len(asked) == stop:
            raise KeyboardInterrupt
        asked.append(float(jnp.abs(result - exact).max() / jnp.abs(exact).max()))
        return asked[-1]

    x = jnp.linspace(-1, 1, 256).reshape(16, 16) / 4
    call = {"fn": chained, "args": (x,), "budget": 2e-3, "error": worst}
    stop, state = None, tmp_path / "state.json"
    whole = tune(**call)
    runs = list(asked)
    asked.clear()
    stop = 2
    with pytest.raises(KeyboardInterrupt):
        tune(**call, state=state)
    stop = None
    assert tune(**call, state=state) == whole
    assert asked == runs
    assert len(runs) > 2


@pytest.mark.parametrize("text", ["", "[]", '{"fingerprint": 1', '{"a": 1}'])
def test_a_state_that_is_none_is_refused(tmp_path, text):
    """A file that tune did not write is named, and left alone."""
    state = tmp_path / "state.json"
    state.write_text(text)
    with pytest.raises(jaxamp.errors.TuningError, match=r"state\.json is not a state of a search"):
        tune(fragile, arguments(0), state=state)
    assert state.read_text() == text
    with pytest.raises(jaxamp.errors.TuningError, match="there is no folder"):
        tune(fragile, arguments(0), state=tmp_path / "no" / "state.json")


def test_the_same_call_gives_the_same_answer(tuned, capsys):
    """Policy, measured errors, curve and runs; and a bar that shows how far it is."""
    again = tune(fragile, arguments(0), budget=5e-3, progress=True)
    assert again == tuned
    shown = capsys.readouterr().out
    assert "groups low" in shown
    assert "100%" in shown


def test_a_result_of_zeros_has_no_error_as_long_as_it_stays_zero():
    """Beside another result; where rounding would make something of it, that is not rounded."""
    x, _, _, w = arguments(0)
    still = tune(lambda x: (jnp.tanh(x @ w) @ w, 0 * (x @ w)), (x,), budget=1e-2)
    assert 0 < still.error <= 1e-2
    assert still.cost < still.cost_f32
    one, near_one = jnp.eye(16), jnp.full((16, 16), 1.001)

    def cancelling(x):
        return jnp.tanh(x @ w) @ w, jnp.tanh(x @ one) @ one - jnp.tanh(x)

    exact = tune(cancelling, (near_one,), budget=1e-2)
    assert exact.error <= 1e-2
    assert not jaxamp.amp(cancelling, exact.policy)(near_one)[1].any()


def test_one_rule_is_a_rule(tuned):
    """The summary counts as people do."""
    assert f"{len(tuned.policy.rules)} rule, {tuned.runs} runs" in str(tuned)
    assert "cancelling" in str(tuned)


def test_picture(tuned, tmp_path):
    """The trade-off is drawn."""
    tuned.picture(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000


def test_gradients_and_own_metrics():
    """The error of a gradient, and an error of the user's own."""

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    x, _, _, w = arguments(0)
    found = tune(loss, (w, x), budget=1e-2, error="gradient")
    assert 0 < found.error <= 1e-2

    def worst(result, exact):
        return float(jnp.abs(result - exact).max())

    assert tune(loss, (w, x), budget=1e-9, error=worst).error <= 1e-9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"args": 3}, "write \\(x,\\)"),
        ({"budget": 0.0}, "above 0"),
        ({"budget": "1e-2"}, "above 0, not '1e-2'"),
        ({"error": "loss"}, "'output', 'gradient'"),
        ({"max_runs": 1}, "at least 2"),
        ({"max_runs": "9"}, "at least 2"),
        ({"args": (jnp.zeros(2),)}, "not finite"),
        ({"args": (jax.ShapeDtypeStruct((2,), jnp.float32),)}, "arrays rather than shapes"),
    ],
)
def test_errors_teach(change, message):
    """What cannot work is refused with what to do instead."""
    with pytest.raises(jaxamp.errors.TuningError, match=message):
        tune(**{"fn": lambda x: 1 / x, "args": (jnp.ones(2),), **change})


def searched(errors, gains, allowed, truth=1.0):
    """A search in which errors are what was predicted, times a number."""
    matrix, gains = np.diag(errors), np.asarray(gains, float)

    def measure(low):
        return truth * float(predicted(matrix, low))

    search = Search(matrix, gains, allowed, measure, lambda low: 100 - low @ gains, 29)
    return search.best(), search


def test_search_repairs_what_prediction_misses():
    """Where errors are three times what was predicted, the result still keeps the budget."""
    errors, gains = np.linspace(1, 2, 20), np.ones(20)
    low, search = searched(errors, gains, 1.0, truth=3.0)
    assert low.any()
    assert search.errors[low.tobytes()] <= 1.0
    assert len(search.errors) <= 29


def test_search_finds_the_cheapest_of_few():
    """With few groups the answer is the best of all choices."""
    rng = np.random.default_rng(0)
    errors, gains = rng.uniform(0.1, 1, 8), rng.uniform(0.1, 1, 8)
    every = (np.arange(256)[:, None] >> np.arange(8)) & 1 == 1
    fine = predicted(np.diag(errors), every) * 1.7 <= 0.5
    low, _ = searched(errors, gains, 0.5, truth=1.7)
    assert 100 - low @ gains <= 1.05 * (100 - (every[fine] @ gains).max())


def test_many_groups_are_chosen_by_integer_programming():
    """A hundred groups: allowed, and no single group more would be."""
    rng = np.random.default_rng(1)
    matrix, gains = rng.normal(size=(8, 100)), rng.uniform(0.1, 1, 100)
    low = cheapest(matrix, gains, 4.0)
    assert predicted(matrix, low) <= 4.0
    assert 5 < low.sum() < 100
