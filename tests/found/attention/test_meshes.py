"""Attention over the devices of a mesh: found, right, and its results lie where they did."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxamp
from tests.found.attention.finding import masks

POLICY = jaxamp.PrecisionPolicy.AUTO_MIXED_BF16.replace(fused_attention=True)
B, T, N, H = 8, 16, 4, 8
SPEC = P("data", None, "heads", None)


def _attend(q, k, v):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def _gradient(fn):
    return jax.value_and_grad(lambda *xs: jnp.sum(fn(*xs) * jnp.cos(xs[0])), (0, 1, 2))


def _mesh(kind):
    return jax.make_mesh((4, 2), ("data", "heads"), axis_types=(kind, kind))


@pytest.mark.product("kind")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
def test_examples_and_heads_over_a_mesh(kind, order):
    """Gradients lie where the operands do, whether the compiler or the types say so."""
    mesh = _mesh(kind)
    draws = jax.random.split(jax.random.key(0), 3)
    operands = [jax.random.normal(draw, (B, T, N, H)) for draw in draws]
    exact = _gradient(_attend)(*operands)[1]
    step = _gradient(jaxamp.amp(_attend, POLICY))
    if order == "amp(grad(f))":
        step = jaxamp.amp(_gradient(_attend), POLICY)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, SPEC)) for x in operands]
        plan = jaxamp.plan_of(_gradient(_attend), POLICY)(*placed)
        found = jax.jit(step)(*placed)[1]
    assert [(a.forward, a.backward) for a in plan.found] == [(True, True)]
    for got, want in zip(found, exact, strict=True):
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, SPEC), got.ndim)
        assert np.max(np.abs(got - want)) <= 0.03 * np.max(np.abs(want))


@pytest.mark.product("spec")
@pytest.mark.parametrize("spec", [P(None, "data", "heads"), P(None, None, "heads"), P("data")])
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
def test_queries_of_one_key_head_on_several_devices(order, spec):
    """Where types do not let a kernel read queries that share keys, attention stays as written."""
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Explicit,) * 2)

    def attend(q, k, v, seen):
        scores = jnp.einsum("bkgth,bksh->bkgts", q, k) * H**-0.5
        scores = jnp.where(seen[:, None, None, None], scores, -1e9)
        return jnp.einsum("bkgts,bksh->bkgth", jax.nn.softmax(scores), v)

    draws = jax.random.split(jax.random.key(0), 3)
    shapes = (B, 2, 2, T, H), (B, 2, T, H), (B, 2, T, H)
    operands = [jax.random.normal(*drawn) for drawn in zip(draws, shapes, strict=True)]
    operands.append(jnp.arange(T) < jnp.arange(B)[:, None] + 9)
    exact = _gradient(attend)(*operands)[1]
    step = _gradient(jaxamp.amp(attend, POLICY))
    if order == "amp(grad(f))":
        step = jaxamp.amp(_gradient(attend), POLICY)
    specs = spec, P(*spec[:2]), P(*spec[:2]), P(*spec[:1])
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(operands, specs, strict=True)
        ]
        plan = jaxamp.plan_of(_gradient(attend), POLICY)(*placed)
        found = jax.jit(step)(*placed)[1]
    assert len(plan.found) == (tuple(spec) != (None, None, "heads"))
    for got, want, given in zip(found, exact, placed, strict=False):
        assert got.sharding.is_equivalent_to(given.sharding, got.ndim)
        assert np.max(np.abs(got - want)) <= 0.03 * np.max(np.abs(want))


def test_several_meshes_in_one_program():
    """JAX lowers what asks for devices only where all lies on one mesh: a kernel asks for none."""
    other = jax.make_mesh((2, 4), ("heads", "words"), axis_types=(AxisType.Auto,) * 2)
    here, there = NamedSharding(_mesh(AxisType.Auto), SPEC), NamedSharding(other, P(None, "words"))
    draws = jax.random.split(jax.random.key(0), 3)
    operands = [jax.random.normal(draw, (B, T, N, H)) for draw in draws]
    exact = _gradient(_attend)(*operands)[1]

    def placed(*xs):
        return jax.lax.with_sharding_constraint(_attend(*xs), there)

    found = jaxamp.amp(_gradient(placed), POLICY)(*jax.device_put(operands, [here, there, here]))
    for got, want in zip(found[1], exact, strict=True):
        assert np.max(np.abs(got - want)) <= 0.03 * np.max(np.abs(want))


def test_types_that_no_context_tells():
    """Masks that lie on a mesh by their types alone are still known numbers."""
    place = NamedSharding(_mesh(AxisType.Explicit), SPEC)
    operands = [jax.ShapeDtypeStruct((B, T, N, H), jnp.float32, sharding=place)] * 3
    plan = jaxamp.plan_of(_gradient(_attend), POLICY)(*operands)
    assert [a.backward for a in plan.found] == [True]
    assert masks(plan.jaxpr) == ["causal"]


@pytest.mark.product("layers", every=2)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("layers", [2, 0])
def test_a_mapped_function_and_its_gradient(layers, check_vma):
    """The pass backward is in a mapped function of its own; with a loop in both nothing changes.

    Whether types say which values differ between devices, or nothing does.
    """
    mesh = _mesh(AxisType.Auto)

    def stack(q, k, v):
        if not layers:
            return _attend(q, k, v)
        return jax.lax.scan(lambda x, scale: (_attend(x, scale * k, v), None), q, jnp.ones(2))[0]

    mapped = jax.shard_map(
        stack, mesh=mesh, in_specs=(SPEC,) * 3, out_specs=SPEC, check_vma=check_vma
    )
    draws = jax.random.split(jax.random.key(0), 3)
    operands = [jax.random.normal(draw, (B, T, N, H)) for draw in draws]
    exact = _gradient(mapped)(*operands)[1]
    plan = jaxamp.plan_of(_gradient(mapped), POLICY)(*operands)
    assert len(plan.found) == (0 if layers else 1)  # a loop in both is left alone
    found = jax.jit(jaxamp.amp(_gradient(mapped), POLICY))(*operands)[1]
    for got, want in zip(found, exact, strict=True):
        assert np.max(np.abs(got - want)) <= 0.03 * np.max(np.abs(want))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_mapped_function_that_sums_over_devices(check_vma):
    """Its body is changed where the axes of the mesh have their names, and types what they say."""

    def body(q, k, v):
        return _attend(q, k, v) - jax.lax.pmean(jnp.mean(v), "data")

    mapped = jax.shard_map(
        body, mesh=_mesh(AxisType.Auto), in_specs=(SPEC,) * 3, out_specs=SPEC, check_vma=check_vma
    )
    draws = jax.random.split(jax.random.key(0), 3)
    operands = [jax.random.normal(draw, (B, T, N, H)) for draw in draws]
    assert len(jaxamp.plan_of(mapped, POLICY)(*operands).found) == 1
    got, want = jax.jit(jaxamp.amp(mapped, POLICY))(*operands), mapped(*operands)
    assert np.max(np.abs(got - want)) <= 0.03 * np.max(np.abs(want))
