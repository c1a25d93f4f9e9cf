"""Loss scales: their trajectories, their arithmetic, and what a round trip leaves of them."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxamp
from jaxamp import DynamicLossScale, NoOpLossScale, StaticLossScale
from jaxamp.errors import TrainingError
from jaxamp.training.loss_scale import as_loss_scale

# --- Trajectories ------------------------------------------------------------------------------

# PyTorch's published rule as a table. A state is (scale, finite steps in a row).
#   gradients | row complete            | next scale      | next count
#   not finite| -                       | scale * backoff | 0
#   finite    | no                      | scale           | count + 1
#   finite    | yes, scale * growth inf | scale           | 0
#   finite    | yes                     | scale * growth  | 0
TORCH = {
    (False, False): lambda scale, count, growth, backoff: (scale * backoff, 0),
    (False, True): lambda scale, count, growth, backoff: (scale * backoff, 0),
    (True, False): lambda scale, count, growth, backoff: (scale, count + 1),
    (True, True): lambda scale, count, growth, backoff: (
        (scale * growth if np.isfinite(np.float32(scale * growth)) else scale),
        0,
    ),
}


def torch_trajectory(
    script: Any, scale: Any, growth: float, backoff: float, interval: int
) -> list[tuple[np.float32, int]]:
    """Scales and counts after each step, products in double and rounded to float32."""
    states, count = [], 0
    for finite in script:
        rule = TORCH[bool(finite), count + 1 == interval]
        with np.errstate(over="ignore"):
            scale, count = rule(float(scale), count, growth, backoff)
            scale = np.float32(scale)
        states.append((scale, count))
    return states


def our_trajectory(script: Any, scale: DynamicLossScale) -> list[tuple[np.float32, int]]:
    """Scales and counts after each step, all steps in one compiled scan."""

    def step(scale: DynamicLossScale, finite: jax.Array) -> Any:
        scale = scale.adjust(finite)
        return scale, (scale.loss_scale, scale.counter)

    _, (scales, counts) = jax.jit(lambda s, x: jax.lax.scan(step, s, x))(scale, jnp.array(script))
    return list(zip(np.asarray(scales), np.asarray(counts).tolist(), strict=True))


SCRIPTS = {
    "all finite": [True] * 40,
    "never finite": [False] * 20,
    "one bad step": [True] * 7 + [False] + [True] * 20,
    "bad at the end of a row": ([True] * 3 + [False]) * 8,
    "bad after growth": ([True] * 4 + [False]) * 8,
    "alternating": [True, False] * 12,
    "chance": (np.random.default_rng(0).random(90) > 0.15).tolist(),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize(
    ("growth", "backoff", "interval"),
    [(2.0, 0.5, 4), (2.0, 0.5, 1), (4.0, 0.25, 3), (1.5, 0.75, 4)],
)
def test_trajectory_is_that_of_grad_scaler(script, growth, backoff, interval):
    """Bit by bit the scales and counts of PyTorch's algorithm, from its own first scale."""
    scale = DynamicLossScale(
        65536.0, period=interval, factor=growth, backoff=backoff, min_loss_scale=0.0
    )
    assert our_trajectory(script, scale) == torch_trajectory(
        script, 65536.0, growth, backoff, interval
    )


def test_trajectory_written_out():
    """One script by hand, so that the table above has a witness."""
    script = [True, True, True, False, True, True, True, True, False, False]
    scales = [s for s, _ in our_trajectory(script, DynamicLossScale(8.0, period=3))]
    assert scales == [8, 8, 16, 8, 8, 8, 16, 16, 8, 4]
    assert scales == [s for s, _ in torch_trajectory(script, 8.0, 2.0, 0.5, 3)]


def test_growth_stops_before_infinity():
    """The scale grows to the last one that float32 can invert, and stays there."""
    trajectory = our_trajectory([True] * 6, DynamicLossScale(2.0**124, period=1))
    assert [s for s, _ in trajectory] == [2.0**125, *[2.0**126] * 5]
    assert trajectory[:2] == torch_trajectory([True] * 2, 2.0**124, 2.0, 0.5, 1)


def test_defaults_are_the_documented_ones():
    """2¹⁵, twice after 2000 finite steps, half after an overflow, at least 1."""
    scale = DynamicLossScale()
    assert float(scale.loss_scale) == 2.0**15
    row = our_trajectory([True] * 2000 + [False], scale)
    assert [s for s, _ in row[-3:]] == [2.0**15, 2.0**16, 2.0**15]
    assert our_trajectory([False] * 20, scale)[-1] == (1.0, 0)


@pytest.mark.parametrize("finite", [True, False])
def test_floor_and_ceiling_hold(finite):
    """At the ceiling finite steps change nothing, at the floor overflows do not."""
    scale = DynamicLossScale(64.0, period=1, min_loss_scale=64.0, max_loss_scale=64.0)
    assert our_trajectory([finite] * 4, scale) == [(64.0, 0)] * 4
    free = DynamicLossScale(64.0, period=1, min_loss_scale=8.0, max_loss_scale=512.0)
    assert our_trajectory([finite] * 9, free)[-1] == (512.0 if finite else 8.0, 0)


def test_a_row_longer_than_the_period_ends():
    """A checkpoint of a run with a longer period grows at once instead of never."""
    scale = DynamicLossScale(8.0, jnp.int32(100), period=10)
    assert float(scale.adjust(True).loss_scale) == 16.0


# --- jmp's published cases, restated -----------------------------------------------------------


def test_no_op_returns_the_tree_itself():
    """Scaling by nothing copies nothing."""
    scale, tree = NoOpLossScale(), {"a": jnp.ones([])}
    assert scale.scale(tree) is tree
    assert scale.unscale(tree) is tree
    assert scale.adjust(jnp.bool_(False)) is scale
    assert scale.loss_scale == 1
    assert jax.tree.leaves(scale) == []


@pytest.mark.parametrize("cls", [StaticLossScale, DynamicLossScale])
@pytest.mark.parametrize("factor", [2, 3, 4.0])
def test_scale_and_unscale_a_tree(cls, factor):
    """Python numbers serve as factors; scaling and unscaling are inverse."""
    scale, tree = cls(factor), {"a": jnp.array(1.0)}
    scaled = scale.scale(tree)
    assert scaled == {"a": jnp.array(1.0 * factor)}
    assert scale.unscale(scaled) == tree


def test_static_is_never_adjusted():
    """Whatever the gradients are, the same object comes back."""
    scale = StaticLossScale(8.0)
    assert scale.adjust(jnp.bool_(False)) is scale


def test_construction_warns_of_nothing():
    """A Python float as the scale is what everybody writes."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DynamicLossScale(2.0**15)


@pytest.mark.parametrize(("period", "factor"), [(20, 2), (30, 3)])
def test_increases_on_finite(period, factor):
    """The counter counts to the period, then the scale grows and the counter starts anew."""
    scale = DynamicLossScale(jnp.float32(10), jnp.int32(0), period, factor)
    for i in range(1, period):
        scale = scale.adjust(jnp.bool_(True))
        assert (scale.loss_scale, scale.counter) == (10, i)
        assert (scale.period, scale.factor) == (period, factor)
    scale = scale.adjust(jnp.bool_(True))
    assert (scale.loss_scale, scale.counter) == (10 * factor, 0)


@pytest.mark.parametrize(
    ("period", "factor", "floor"),
    [(20, 2, None), (30, 3, None), (20, 2, 0.3125), (30, 3, 0.37), (5.0, 2.0, 0.0)],
)
def test_reduces_on_nonfinite_down_to_the_floor(period, factor, floor):
    """Every bad step divides, and none goes below the floor, 1 where none is given."""
    floors = () if floor is None else (jnp.asarray(floor),)
    scale = DynamicLossScale(jnp.float32(10), jnp.int32(0), period, factor, *floors)
    for i in range(100):
        scale = scale.adjust(jnp.bool_(False))
        expected = max(1.0 if floor is None else floor, 10 / factor ** (i + 1))
        np.testing.assert_allclose(scale.loss_scale, expected, rtol=1e-5)
        assert scale.counter == 0


def test_adjust_wants_a_boolean_scalar():
    """A vector of flags, or a number, is refused in words."""
    for wrong in (jnp.ones([3], bool), jnp.float32(1), 1):
        with pytest.raises(TrainingError, match=r"boolean scalar.*all_finite"):
            DynamicLossScale().adjust(wrong)


def test_integer_scales_become_floats():
    """Where jmp warns, the number is taken as what it says."""
    scale = DynamicLossScale(jnp.int32(8), min_loss_scale=jnp.int32(2))
    assert scale.loss_scale.dtype == scale.min_loss_scale.dtype == jnp.float32


# --- Arithmetic --------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-20, 0, 15, 16, 40, 100, 126])
@pytest.mark.parametrize("cls", [StaticLossScale, DynamicLossScale])
def test_unscaling_by_a_power_of_two_is_exact(cls, exponent):
    """What was scaled comes back bit by bit, compiled or not, also at the largest scale."""
    values = np.random.default_rng(exponent % 7).normal(size=1000).astype(np.float32)
    values *= np.float32(2.0 ** -max(exponent - 100, 0))  # the product is to be finite
    scale = cls(2.0**exponent)
    for run in (lambda f, x: f(x), lambda f, x: jax.jit(f)(x)):
        scaled = run(scale.scale, values)
        np.testing.assert_array_equal(scaled, np.ldexp(values, exponent))
        np.testing.assert_array_equal(run(scale.unscale, scaled), values)


def test_unscaling_by_other_factors_is_close():
    """A factor that is no power of two costs two roundings."""
    values = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    np.testing.assert_allclose(StaticLossScale(3.0).unscale(values), values / 3.0, rtol=2.0**-22)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("scale", [StaticLossScale(2.0**20), DynamicLossScale(2.0**20)])
def test_narrow_values_scale_in_float32(dtype, scale):
    """A float16 loss times a large scale is no infinity, and gradients unscale to float32."""
    tiny = jnp.array([1.0, 2.0**-24], dtype)
    for result, exponent in ((scale.scale(tiny), 20), (scale.unscale(tiny), -20)):
        assert result.dtype == jnp.float32
        np.testing.assert_array_equal(result, np.ldexp(np.float32(tiny), exponent))


@pytest.mark.parametrize("wide", [jnp.float16, jnp.float32])
def test_a_float16_scale_can_be_adjusted(wide):
    """A scale given in float16 is kept in float32, where it can grow past 65504."""
    scale = DynamicLossScale(wide(2.0**15), period=1)
    assert scale.loss_scale.dtype == jnp.float32
    assert float(scale.adjust(True).loss_scale) == 2.0**16


def test_leaves_that_are_no_floats_stay():
    """Steps, keys, names and nothing are not multiplied."""
    tree = {"step": 3, "count": jnp.int32(7), "key": jax.random.key(0), "name": "relu", "no": None}
    for method in (DynamicLossScale().scale, StaticLossScale(4).unscale):
        result = method(tree)
        assert all(result[name] is tree[name] for name in tree)


def test_amp_leaves_the_arithmetic_alone():
    """Inside a train step under amp the scaling stays in float32, where 2¹⁷ is no infinity."""
    scale = DynamicLossScale(2.0**17, period=1)

    @functools.partial(jaxamp.amp, policy="auto_mixed")
    def step(w, x, scale):
        def loss_fn(w):
            return scale.scale(jnp.mean(jnp.tanh(x @ w)))

        grads = scale.unscale(jax.grad(loss_fn)(w))
        return grads, scale.adjust(jaxamp.all_finite(grads))

    w, x = jnp.full((3, 2), 0.1), jnp.full((64, 3), 1e-3)
    grads, adjusted = step(w, x, scale)
    expected = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
    np.testing.assert_allclose(grads, expected, rtol=1e-2)
    assert float(adjusted.loss_scale) == 2.0**18


# --- Round trips -------------------------------------------------------------------------------

CUSTOM = DynamicLossScale(
    2.0**10, jnp.int32(5), 7, 4, min_loss_scale=64.0, max_loss_scale=2.0**12, backoff=0.25
)
ROUND_TRIPS = {
    "flatten": lambda s: jax.tree.unflatten(*reversed(jax.tree.flatten(s))),
    "tree map": lambda s: jax.tree.map(lambda x: x, s),
    "jit": jax.jit(lambda s: s),
    "scan": lambda s: jax.lax.scan(lambda c, _: (c, None), s, length=3)[0],
    "vmap": lambda s: jax.tree.map(lambda x: x[0], jax.vmap(lambda _: s)(jnp.arange(2))),
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "deepcopy": copy.deepcopy,
    "device_put": lambda s: jax.device_put(s, jax.devices()[-1]),
}


@pytest.mark.parametrize("trip", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_round_trips_keep_every_field(trip):
    """Scale, counter, floor, ceiling, period, factor and backoff come back, and still work."""
    back = trip(CUSTOM)
    assert back == CUSTOM
    assert jax.tree.structure(back) == jax.tree.structure(CUSTOM)
    for finite, limit in ((True, 2.0**12), (False, 64.0)):
        assert our_trajectory([finite] * 40, back)[-1][0] == limit


def test_orbax_round_trip(tmp_path):
    """A checkpoint gives back the scale, its counter, floor and ceiling, bit by bit."""
    state = {"scale": CUSTOM.adjust(True), "static": StaticLossScale(8.0), "none": NoOpLossScale()}
    state = jax.tree.map(jnp.asarray, state)
    template = {
        "scale": DynamicLossScale(period=7, factor=4, backoff=0.25),
        "none": NoOpLossScale(),
    }
    template = jax.tree.map(jnp.asarray, {**template, "static": StaticLossScale(1.0)})
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", template)
    assert restored == state


def test_leaves_have_names():
    """Checkpoints and error messages call the leaves what the class calls them."""
    paths = jax.tree_util.tree_flatten_with_path(CUSTOM)[0]
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    assert names == [".loss_scale", ".counter", ".min_loss_scale", ".max_loss_scale"]


def test_a_tree_cast_to_bfloat16_still_adjusts():
    """Who casts a whole state keeps a working scale, of one dtype through a scan."""
    narrow = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x,
        DynamicLossScale(period=2),
    )
    scales = [float(s) for s, _ in our_trajectory([True, True, False], narrow)]
    assert scales == [2.0**15, 2.0**16, 2.0**15]
    assert narrow.adjust(True).loss_scale.dtype == jnp.bfloat16


def test_the_adjusted_scale_compiles_once():
    """The scale that comes out of a step goes into it without a new trace."""
    traces = []

    @jax.jit
    def step(scale):
        traces.append(scale)
        return scale.adjust(jnp.bool_(True))

    step(step(step(DynamicLossScale())))
    assert len(traces) == 1


def test_a_donated_scale():
    """A step may own the scale that it is given."""
    step = jax.jit(lambda s: s.adjust(jnp.bool_(True)), donate_argnums=0)
    scale = functools.reduce(lambda s, _: step(s), range(3), DynamicLossScale())
    assert int(scale.counter) == 3


# --- Words -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DynamicLossScale(0.0), "loss_scale is a positive number up to"),
        (lambda: DynamicLossScale(np.inf), "loss_scale is a positive"),
        (lambda: DynamicLossScale(2.0**127), "loss_scale is a positive"),
        (lambda: DynamicLossScale(np.nan), "loss_scale is a positive"),
        (lambda: StaticLossScale(-2), "loss_scale is a positive"),
        (lambda: StaticLossScale(np.ones(3)), "loss_scale is a positive"),
        (lambda: DynamicLossScale(period=0), "period counts steps"),
        (lambda: DynamicLossScale(factor=0.5), "factor is what the scale grows by"),
        (lambda: DynamicLossScale(backoff=2.0), "backoff shrinks"),
        (lambda: DynamicLossScale(min_loss_scale=-1.0), "min_loss_scale"),
        (lambda: DynamicLossScale(min_loss_scale=8, max_loss_scale=4), "above its ceiling"),
        (lambda: as_loss_scale(1024.0), "1024.0 is no loss scale.*StaticLossScale"),
    ],
)
def test_wrong_numbers_teach(make, message):
    """Numbers that make no sense are refused where they are given."""
    with pytest.raises(TrainingError, match=message):
        make()


def test_objects_of_ones_own_are_accepted():
    """Whatever has the three methods is a loss scale."""

    class Mine(jmp.NoOpLossScale):
        pass

    Mine.__module__ = "elsewhere"
    mine = Mine()
    assert as_loss_scale(mine) is mine
