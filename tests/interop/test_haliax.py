"""A haliax model under amp, and under haliax's own resources, from one policy."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxamp import Precision, amp, plan_of, policy_scope
from jaxamp.interop.haliax import resource_env
from jaxamp.policy.context import current_policy
from jaxamp.training.dtype_roles import cast_floating
from tests.ecosystem.haliax_model import loss_fn, make


def distance(tree, reference):
    """The norm of the difference of two trees, as a part of that of the reference."""
    pairs = list(zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True))
    difference = sum(np.sum((np.asarray(a, np.float32) - b) ** 2) for a, b in pairs)
    return np.sqrt(difference / sum(np.sum(np.square(b)) for _, b in pairs))


ORDERS = {
    "grad of amp": lambda policy: eqx.filter_value_and_grad(amp(loss_fn, policy)),
    "amp of grad": lambda policy: amp(eqx.filter_value_and_grad(loss_fn), policy),
}


@pytest.mark.parametrize(
    ("policy", "order", "bound"),
    [
        ("auto_mixed_bf16", "grad of amp", 0.06),
        pytest.param("auto_mixed", "amp of grad", 0.008, marks=pytest.mark.long),
    ],
)
def test_gradients_of_a_haliax_model(policy, order, bound):
    """Through scan, remat and named axes; gradients are f32."""
    model, *batch = make()
    loss, grads = eqx.filter_jit(eqx.filter_value_and_grad(loss_fn))(model, *batch)
    low_loss, low_grads = eqx.filter_jit(ORDERS[order](policy))(model, *batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(low_grads)} == {jnp.dtype("float32")}
    assert 0 < distance(low_grads, grads) < bound
    assert distance(low_loss, loss) < bound / 10


def test_the_products_of_a_haliax_model_are_low():
    """Named contractions are planned as any others; only the loss's inner product stays f32."""
    plan = plan_of(loss_fn, "auto_mixed_bf16")(*make())
    products = [d.operand for d in plan.decisions() if d.primitive == "dot_general"]
    assert products.count(Precision.BF16) == 9
    assert products.count(Precision.F32) == 1


def test_one_policy_drives_amp_and_haliax_s_own_resources():
    """On a 2x2 mesh: `amp` of the model, and the model cast by role, agree with one device."""
    model, *batch = make()
    loss = loss_fn(model, *batch)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    mapping = {"batch": "data", "heads": "model", "vocab": "model"}
    with resource_env(mapping, "auto_mixed_bf16", mesh) as policy:
        assert current_policy() is policy
        sharded = hax.shard(model)
        amped = hax.named_jit(amp(loss_fn, policy))(sharded, *batch)
        by_role = hax.named_jit(loss_fn)(cast_floating(sharded, "compute"), *batch)
        assert cast_floating(sharded, "param").embedding.weight.dtype == jnp.float32
    assert len(sharded.embedding.weight.array.sharding.device_set) == 4
    assert 0 < distance(amped, loss) < 0.003
    assert 0 < distance(by_role, loss) < 0.003


AROUND = {
    "amp inside named_jit": lambda mapping, policy: hax.named_jit(
        amp(loss_fn, policy), axis_resources=mapping
    ),
    "amp around named_jit": lambda mapping, policy: amp(
        hax.named_jit(loss_fn, axis_resources=mapping), policy
    ),
}


@pytest.mark.parametrize("jitted", AROUND.values(), ids=AROUND)
def test_amp_in_what_haliax_itself_puts_in_force(jitted):
    """Its mesh, its mapping and `named_jit`, without anything of ours but the policy's scope."""
    model, *batch = make()
    loss = loss_fn(model, *batch)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    mapping = {"batch": "data", "heads": "model", "vocab": "model"}
    with hax.partitioning.set_mesh(mesh), hax.axis_mapping(mapping):
        sharded = hax.shard(model)
        with policy_scope("auto_mixed_bf16") as policy:
            amped = jitted(mapping, policy)(sharded, *batch)
            low = cast_floating(sharded, "compute")
    assert len(sharded.embedding.weight.array.sharding.device_set) == 4
    assert low.embedding.weight.dtype == jnp.bfloat16
    assert low.embedding.weight.array.sharding == sharded.embedding.weight.array.sharding
    assert 0 < distance(amped, loss) < 0.003
