"""What a round trip leaves of a loss scale: all of it."""

from __future__ import annotations

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from jaxamp.training import DynamicLossScale, NoOpLossScale, StaticLossScale
from tests.training.trajectory import our_trajectory

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
