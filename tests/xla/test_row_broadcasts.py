"""What a group has for each row, and how it comes back to the row on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxamp import amp
from jaxamp.xla.primitives.narrow_moves import inlined
from jaxamp.xla.primitives.row_broadcasts import flatten_row_broadcasts
from tests.audit import equations

BATCH, HEADS, LENGTH, DEPTH = 2, 4, 64, 8  # 64 rows of 64 are whole tiles
Q = jnp.ones((BATCH, HEADS, LENGTH, DEPTH))
FLAT = re.compile(rf"tensor<{BATCH * HEADS * LENGTH}x{LENGTH}xf32>")


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
    return (jnp.einsum("bhqk,bhkd->bhqd", weights, v) ** 2).sum()


def normed(x: jax.Array, w: jax.Array) -> jax.Array:
    hidden = x @ w
    return ((hidden - hidden.mean(-1, keepdims=True)) @ w).sum()


def flat(platform: str, fn: Callable[..., Any], *args: Any) -> int:
    """How many arrays of one row after another a lowered program has."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    return len(FLAT.findall(text))


@pytest.mark.parametrize("order", ["grad_of_amp", "amp_of_grad"])
def test_scores_of_heads_are_rows_on_a_gpu_alone(order: str) -> None:
    """The softmax and its derivative are lowered so; a TPU and a CPU get what they always got."""
    fn = jax.grad(amp(attention)) if order == "grad_of_amp" else amp(jax.grad(attention))
    assert [flat(p, fn, Q, Q, Q) > 0 for p in ("cuda", "tpu", "cpu")] == [True, False, False]


@pytest.mark.parametrize(
    ("rows", "columns", "is_flat"),
    [(8, 256, True), (196, 196, False), (200, 196, True), (33, 4096, False), (34, 4096, True)],
)
def test_rows_that_are_not_whole_tiles_stay(rows: int, columns: int, is_flat: bool) -> None:
    """XLA would part the softmax of a ViT's 196 patches in four, and store its scores in f32."""
    closed = jax.make_jaxpr(jax.nn.softmax)(jnp.ones((2, 3, rows, columns)))
    assert (flatten_row_broadcasts(closed) is not closed) is is_flat


def grouped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Two heads of queries for each of keys, whose product is transposed."""
    q = q.reshape(BATCH, LENGTH, HEADS // 2, 2, DEPTH)
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", q, k)
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
    return (jnp.einsum("bgrqk,bkgd->bqgrd", weights, v) ** 2).sum()


@pytest.mark.parametrize("order", ["grad_of_amp", "amp_of_grad"])
def test_scores_that_were_transposed_are_no_rows(order: str) -> None:
    """What a flat array reads would be transposed in float32, in both passes."""
    q, key = jnp.ones((BATCH, LENGTH, HEADS, DEPTH)), jnp.ones((BATCH, LENGTH, HEADS // 2, DEPTH))
    product = jax.make_jaxpr(grouped)(q, key, key).jaxpr
    assert any(e.primitive.name == "transpose" for e in equations(product))
    fn = jax.grad(amp(grouped)) if order == "grad_of_amp" else amp(jax.grad(grouped))
    assert flat("cuda", fn, q, key, key) == 0


def branched(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.lax.cond(q.sum() > 0, attention, lambda *args: attention(*args) + 1, q, k, v)


def forward(fn: Callable[..., Any]) -> int:
    """How many such arrays the forward pass of the gradient has, where nothing is a checkpoint."""
    _, pull = jax.vjp(amp(fn), Q, Q, Q)
    both, back = flat("cuda", jax.value_and_grad(amp(fn)), Q, Q, Q), flat("cuda", pull, 1.0)
    return both - back


@pytest.mark.parametrize("fn", [attention, branched])
def test_forward_passes_have_rows_too(fn: Callable[..., Any]) -> None:
    """JAX leaves of a group's checkpoint what it computes; in branches as well."""
    assert forward(fn) > 0


def test_effects_and_operations_without_results_stay() -> None:
    """As callbacks are, and writes to a Ref."""

    def noted(q: jax.Array) -> jax.Array:
        total = jax.new_ref(jnp.zeros(()))
        total[...] += attention(q, q, q)
        jax.debug.callback(lambda _: None, q.sum())
        return total[...]

    closed = inlined(jax.make_jaxpr(noted)(Q))
    changed = flatten_row_broadcasts(closed)
    assert changed is not closed
    assert changed.effects == closed.effects
    names = [eqn.primitive.name for eqn in equations(changed.jaxpr)]
    assert names.count("debug_callback") == 1


def test_one_function_for_all_calls() -> None:
    """Calls of one compiled form stay calls of one function."""
    amped = amp(attention)
    twice = jax.jit(lambda q: amped(q, q, q) + amped(2 * q, q, q)).trace(Q)
    text = twice.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"func.func private @jaxamp_region", text)) == 1
    assert len(re.findall(r"call @jaxamp_region", text)) == 2


def test_calls_for_several_platforms_are_not_parted() -> None:
    """Others' programs, and ours, are exported as JAX alone would: one function for all."""
    inner = jax.jit(lambda x: x + 1)

    def outer(x: jax.Array) -> jax.Array:
        return 2 * inner(x)

    for fn in (outer, amp(outer)):
        lowered = jax.jit(fn).trace(Q).lower(lowering_platforms=("cpu", "cuda"))
        assert "stablehlo.case" not in lowered.as_text()


@jax.jit
def softmax(x: jax.Array) -> jax.Array:
    exps = jnp.exp(x - x.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def test_a_function_of_the_users_under_jit_is_looked_into() -> None:
    """In a group its body stands in the place of the call."""

    def scored(q: jax.Array, k: jax.Array) -> jax.Array:
        return (
            jnp.einsum("bhqk,bhkd->bhqd", softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k)), k)
        ).sum()

    assert flat("cuda", amp(scored), Q, Q) > 0
    closed = jax.make_jaxpr(softmax)(jnp.ones((2, 3, 8, 256)))
    assert flatten_row_broadcasts(inlined(closed)) is not closed
    assert "jit" not in [eqn.primitive.name for eqn in inlined(closed).jaxpr.eqns]


def test_what_is_not_amped_is_not_touched() -> None:
    """The lowering is of jaxamp's groups: neither float32 programs nor checkpoints have it."""
    assert flat("cuda", jax.grad(attention), Q, Q, Q) == 0
    assert flat("cuda", jax.grad(jax.checkpoint(attention)), Q, Q, Q) == 0


def test_words_of_a_batch_stay_as_they_are() -> None:
    """Of rows of two axes tiles take the last: a norm is lowered as it was."""
    x, w = jnp.ones((BATCH * HEADS, LENGTH, LENGTH)), jnp.ones((LENGTH, LENGTH))
    assert flat("cuda", amp(jax.grad(normed)), x, w) == 0


def test_arrays_that_are_divided_keep_their_axes() -> None:
    """Rows that several devices share cannot be counted through; those of one device can."""
    devices = np.array(jax.devices()[:2])
    sharding = NamedSharding(Mesh(devices, "heads"), PartitionSpec(None, "heads"))
    q = jax.ShapeDtypeStruct(Q.shape, Q.dtype, sharding=sharding)
    assert flat("cuda", amp(jax.grad(attention)), q, q, q) == 0
    one = NamedSharding(Mesh(devices[:1], "heads"), PartitionSpec(None, "heads"))
    q = jax.ShapeDtypeStruct(Q.shape, Q.dtype, sharding=one)
    assert flat("cuda", amp(jax.grad(attention)), q, q, q) > 0


def test_a_mesh_in_types_is_left_alone() -> None:
    """Axes that a mesh is written into are not made one, not even on one device."""
    mesh = jax.make_mesh(
        (1,), ("heads",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1]
    )
    with jax.set_mesh(mesh):
        q = jax.device_put(Q, NamedSharding(mesh, PartitionSpec(None, "heads")))
        assert flat("cuda", amp(jax.grad(attention)), q, q, q) == 0


def test_inside_of_shard_map_each_device_has_its_rows() -> None:
    """There arrays are a device's own."""
    mesh = Mesh(np.array(jax.devices()[:2]), "batch")
    spec = PartitionSpec("batch")
    fn = jax.shard_map(
        amp(jax.grad(attention)), mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec
    )
    args = [jnp.ones((2 * BATCH, HEADS, LENGTH, DEPTH))] * 3
    assert flat("cuda", fn, *args) > 0


def softmax_and_cotangent(x: jax.Array, g: jax.Array) -> Any:
    y, pull = jax.vjp(jax.nn.softmax, x)
    return y, pull(g), x.sum(-1, keepdims=True) * jnp.ones(x.shape[-1])


def test_the_numbers_are_the_same() -> None:
    """Broadcasts of either form are found; XLA:CPU divides by repeated numbers in a way of its own,
    to the last bit of float32."""
    x, g = (jax.random.normal(jax.random.key(i), (2, 3, 64, 32)) for i in range(2))
    closed = inlined(jax.make_jaxpr(softmax_and_cotangent)(x, g))
    changed = flatten_row_broadcasts(closed)
    names = [eqn.primitive.name for eqn in equations(changed.jaxpr)]
    assert names.count("reshape") > 2 * 5
    wanted = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, x, g)
    got = jax.core.eval_jaxpr(changed.jaxpr, changed.consts, x, g)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-22, atol=2**-24)


def test_symbolic_sizes_are_left_alone() -> None:
    """Their rows cannot be counted before they are known."""
    (b,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((b, 3, 4, 5), jnp.float32)
    closed = jax.make_jaxpr(jax.nn.softmax)(x)
    assert flatten_row_broadcasts(closed) is closed
