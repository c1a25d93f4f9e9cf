"""Losses over the devices of a mesh: right, and with no gather that the program had not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxamp

POLICY = jaxamp.PrecisionPolicy.MIXED_BF16.replace(loss_in_chunks=True)
STORED = POLICY.replace(loss_in_chunks=False)
B, T, D, V = 8, 32, 16, 512


def _loss(x, w, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()


def _losses(plan):
    return [region for region in plan.found if region.kind == "loss"]


def _refused(plan):
    return [region for region in plan.refused if region.kind == "loss"]


def _operands():
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (B, T, D)), jax.random.normal(keys[1], (D, V)) / 4
    return x, w, jax.random.randint(keys[2], (B, T), 0, V)


def _gathered(text):
    """The largest array that devices gather, in elements."""
    shapes = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather", text)
    return max((int(np.prod([int(n) for n in s.split(",")])) for s in shapes), default=0)


def _close(got, want):
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.max(np.abs(mine - other)) <= 0.03 * np.max(np.abs(other))


@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize(
    ("tokens", "words"),
    [(P("data"), P()), (P("data"), P(None, "model")), (P(None, "data"), P(None, "model")),
     (P("data"), P("data", "model"))],
)  # fmt: skip
def test_auto_meshes(tokens, words, order):
    """Examples, words of the text and words of the vocabulary, divided in the usual ways."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    operands = _operands()
    exact = jax.value_and_grad(_loss, (0, 1))(*operands)
    specs = (tokens, words, P(*tokens[:2]))
    placed = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(operands, specs, strict=True)
    ]
    texts = []
    for policy in (POLICY, STORED):
        step = jaxamp.amp(jax.value_and_grad(_loss, (0, 1)), policy)
        if order == "grad(amp(f))":
            step = jax.value_and_grad(jaxamp.amp(_loss, policy), (0, 1))
        compiled = jax.jit(step).lower(*placed).compile()
        _close(compiled(*placed), exact)
        texts.append(compiled.as_text())
    assert "while" in texts[0]
    assert _gathered(texts[0]) <= max(_gathered(texts[1]), B * T * D)


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
def test_in_a_shard_map(order, is_checked):
    """Each device has chunks of its own tokens."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    operands, specs = _operands(), (P("data"), P(), P("data"))
    exact = jax.value_and_grad(_loss, (0, 1))(*operands)
    step = jaxamp.amp(jax.value_and_grad(_loss, (0, 1)), POLICY)
    if order == "grad(amp(f))":
        step = jax.value_and_grad(jaxamp.amp(_loss, POLICY), (0, 1))

    def each(x, w, labels):
        w = jax.lax.pcast(w, "data", to="varying")
        value, (dx, dw) = step(x, w, labels)
        return jax.lax.pmean(value, "data"), (dx / 8, jax.lax.pmean(dw, "data"))

    with jax.set_mesh(mesh):
        shards = [NamedSharding(mesh, spec) for spec in specs]
        placed = [jax.device_put(x, at) for x, at in zip(operands, shards, strict=True)]
        mapped = jax.shard_map(
            each, mesh=mesh, in_specs=specs, out_specs=(P(), (P("data"), P())), check_vma=is_checked
        )
        _close(jax.jit(mapped)(*placed), exact)
        assert "while" in jax.jit(mapped).lower(*placed).as_text()


def test_explicit_meshes_are_left_alone():
    """Types say where arrays lie; the reason says so."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, s))
            for x, s in zip(_operands(), (P("data"), P(), P("data")), strict=True)
        ]
        plan = jaxamp.plan_of(jax.grad(_loss), POLICY)(*placed)
    assert not _losses(plan)
    assert "explicit mesh" in _refused(plan)[0].obstacle


def test_several_devices_by_default():
    """Where arrays lie is not known before XLA has divided them, so it is asked for."""
    x, w = (
        jax.ShapeDtypeStruct((8192, 64), jnp.float32),
        jax.ShapeDtypeStruct((64, 65536), jnp.float32),
    )
    labels = jax.ShapeDtypeStruct((8192,), jnp.int32)
    plan = jaxamp.plan_of(jax.grad(_loss, (0, 1)), "mixed_bf16")(x, w, labels)
    assert not _losses(plan)
    assert "several devices" in _refused(plan)[0].obstacle
