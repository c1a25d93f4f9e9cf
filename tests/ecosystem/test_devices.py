"""Train steps on eight fake devices: data parallel, FSDP and tensor parallel, by jit and by hand.

What is shown: the results are those of one device, and a number that is not finite on one device
skips the step on all.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.collectives import programs
from jaxamp import amp
from jaxamp.errors import TrainingError
from jaxamp.training import DynamicLossScale, scaled_value_and_grad, select_tree

SIZE = programs.Size(layers=2, width=32, heads=4, words=40, length=8, batch=16)


def same(fn):
    return fn


ORDERS = {"grad of amp": (amp, same), "amp of grad": (same, amp)}
STEPS = [
    ("jit", "fsdp", "grad of amp"),
    ("shard_map", "fsdp", "amp of grad"),
    ("jit", "data parallel", "amp of grad"),
    ("shard_map", "data parallel", "grad of amp"),
    ("jit", "tensor parallel", "grad of amp"),
    ("shard_map", "tensor parallel", "amp of grad"),
]


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def inputs():
    """Parameters and words."""
    return programs.init(SIZE, jax.random.key(0)), programs.sample(SIZE, jax.random.key(1))


@pytest.fixture(scope="module")
def reference(inputs):
    """One step in float32 on one device: new parameters and the loss."""
    params, words = inputs
    loss_fn = partial(programs.loss_fn, SIZE, programs.Moves())
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params, words)
    return programs.update(params, grads), loss


def placed(strategy, mesh, inputs):
    """Copies, as a step donates its parameters."""
    return jax.device_put(jax.tree.map(jnp.copy, inputs), programs.shardings(strategy, mesh))


def largest_difference(tree, reference):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


@pytest.mark.product("strategy", every=2)
@pytest.mark.parametrize(("style", "strategy", "order"), STEPS, ids=map(", ".join, STEPS))
def test_a_step_on_eight_devices_is_that_of_one(style, strategy, order, mesh, inputs, reference):
    """New parameters are f32, where they were, and near those of one device in f32."""
    step = programs.STYLES[style](SIZE, strategy, mesh, *ORDERS[order])
    params, words = placed(strategy, mesh, inputs)
    new, loss = step(params, words)
    assert {leaf.dtype for leaf in jax.tree.leaves(new)} == {jnp.dtype("float32")}
    for leaf, old in zip(jax.tree.leaves(new), jax.tree.leaves(params), strict=True):
        assert leaf.sharding.is_equivalent_to(old.sharding, leaf.ndim)
    assert 0 < abs(float(loss - reference[1])) < 0.02
    assert 0 < largest_difference(new, reference[0]) < 2e-3


def loss_scaled_step(strategy, mesh, by_hand):
    """A step in f16 with a dynamic loss scale; returns parameters, scale and flag."""
    split, rows = programs.SPLITS[strategy], programs.BATCHES[strategy]
    everywhere = ("x", "y")
    ways = mesh.shape["y"] if by_hand and strategy == "tensor parallel" else 1

    def gather(w, axis):
        whole = by_hand and strategy == "fsdp"
        return jax.lax.all_gather(w, everywhere, axis=axis, tiled=True) if whole else w

    def join(x, w):
        return jax.lax.psum(x @ w, "y") if ways > 1 else x @ w

    moves = programs.Moves(gather=gather, join=join, ways=ways)

    def loss_fn(params, words, scales):
        loss = programs.loss_fn(SIZE, moves, params, words)
        loss = loss * scales.mean()
        return jax.lax.pmean(loss, rows[0]) if by_hand else loss

    def step(params, words, scales, loss_scale):
        axes = everywhere if by_hand else None
        gradient = scaled_value_and_grad(
            loss_fn, policy="auto_mixed", loss_scale=loss_scale, axis_name=axes
        )
        (_, grads), finite, loss_scale = gradient(params, words, scales)
        return select_tree(finite, programs.update(params, grads), params), loss_scale, finite

    if by_hand:
        ins, outs = (split, rows, rows, P()), (split, P(), P())
        step = jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=outs)
    return jax.jit(step)


@pytest.mark.product
@pytest.mark.parametrize(
    ("strategy", "by_hand"),
    [
        ("fsdp", False),  # more: test_processes
        ("fsdp", True),
        *(
            pytest.param(strategy, True, marks=pytest.mark.long)
            for strategy in ("data parallel", "tensor parallel")
        ),
    ],
)
def test_all_devices_skip_the_step_that_one_cannot_take(strategy, by_hand, mesh, inputs):
    """A NaN in one device's part of the batch: no parameter changes, the scale is halved once."""
    params, words = placed(strategy, mesh, inputs)
    rows = NamedSharding(mesh, programs.BATCHES[strategy])
    good = jax.device_put(jnp.ones(SIZE.batch), rows)
    bad = jax.device_put(good.at[5].set(jnp.nan), rows)
    step = loss_scaled_step(strategy, mesh, by_hand)

    scale = DynamicLossScale(2.0**10)
    stayed, halved, finite = step(params, words, bad, scale)
    assert not finite
    assert largest_difference(stayed, params) == 0
    assert {float(part.data) for part in halved.loss_scale.addressable_shards} == {2.0**9}

    moved, kept, finite = step(stayed, words, good, halved)
    assert finite
    assert largest_difference(moved, params) > 1e-3
    assert {float(part.data) for part in kept.loss_scale.addressable_shards} == {2.0**9}


@pytest.mark.long
@pytest.mark.parametrize("limit", [1e-3, 1e3])
def test_clipping_by_hand_is_by_the_norm_of_whole_gradients(limit):
    """Split and whole parameters together, after unscaling, as on one device."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    w, b, x = jnp.linspace(-1, 1, 64 * 4).reshape(64, 4), jnp.ones(4), jnp.ones((16, 64)) / 8
    x = x * jnp.arange(1, 17)[:, None]

    def loss_fn(params, x):
        return jnp.mean((x @ params["w"] + params["b"]) ** 2)

    def parted(params, x):
        whole = {**params, "w": jax.lax.all_gather(params["w"], "d", tiled=True)}
        return jax.lax.pmean(loss_fn(whole, x), "d")

    options = {
        "policy": "always_f32",
        "clip_norm": limit,
        "loss_scale": DynamicLossScale(2.0**10),
    }
    split = {"w": P("d"), "b": P()}
    step = partial(jax.shard_map, mesh=mesh, in_specs=(split, P("d")), out_specs=(split, P("d")))

    def clipped(params, x):
        gradient = scaled_value_and_grad(parted, axis_name="d", **options)(params, x)
        return gradient.result[1], gradient.grads_finite[None]

    params = {"w": w, "b": b}
    grads, finite = jax.jit(step(clipped))(params, x)
    (_, expected), _, _ = scaled_value_and_grad(loss_fn, **options)(params, x)
    assert finite.all()
    for name, leaf in expected.items():
        np.testing.assert_allclose(grads[name], leaf, rtol=1e-5, atol=1e-6 * np.abs(leaf).max())
    with pytest.raises(TrainingError, match="Leave check_vma on"):
        step(clipped, check_vma=False)(params, x)
