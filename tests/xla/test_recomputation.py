"""Fused groups and constants made inside loops, seen in the programs that `amp` emits."""

import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from jaxamp import PrecisionPolicy, amp
from jaxamp.xla.hints.techniques import Technique
from tests.audit import equations

POLICY = "auto_mixed_bf16"
WIDTH, TOKENS, LAYERS = 16, 8, 3


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    hidden = x @ w
    centred = hidden - hidden.mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(hidden.var(-1, keepdims=True) + 1e-5)
    return jnp.tanh(normed) @ w.T


def written_out(weights: jax.Array, x: jax.Array) -> jax.Array:
    for w in weights:
        x = layer(x, w)
    return (x**2).mean()


def masked_scan(weights: jax.Array, x: jax.Array) -> jax.Array:
    def step(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), x @ x.T, -jnp.inf)
        return x + jax.nn.softmax(scores) @ (x @ w), None

    return (jax.lax.scan(jax.checkpoint(step), x, weights)[0] ** 2).mean()


@pytest.fixture
def args() -> tuple[jax.Array, jax.Array]:
    key = jax.random.key(0)
    weights = jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
    return weights, jax.random.normal(key, (TOKENS, WIDTH))


def groups(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Checkpoints with a policy: none of the programs here has any of its own."""
    return [e for e in equations(jaxpr) if e.params.get("policy") is not None]


def shared_groups(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Calls of the groups that have more than one place."""
    return [e for e in equations(jaxpr) if e.params.get("name") == "fused"]


def test_equal_layers_call_one_group(args: Any) -> None:
    jaxpr = jax.make_jaxpr(amp(written_out, POLICY))(*args).jaxpr
    called = Counter(id(e.params["jaxpr"].jaxpr) for e in shared_groups(jaxpr))
    assert [*called.values()] == [LAYERS]


def test_layers_with_a_rule_of_their_own_call_one_group(args: Any) -> None:
    """JAX traces a custom_jvp function anew for each call; equal layers are seen as equal."""

    def activated(weights: jax.Array, x: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.nn.relu(x @ w * x.mean(-1, keepdims=True)) @ w.T
        return (x**2).mean()

    jaxpr = jax.make_jaxpr(jax.grad(amp(activated, POLICY)))(*args).jaxpr
    calls = {id(e.params["jaxpr"]) for e in shared_groups(jaxpr)}
    plain = jax.jit(jax.grad(activated))(*args)
    assert len(calls) == 2  # one forward, one backward, of all layers
    np.testing.assert_allclose(jax.grad(amp(activated, POLICY))(*args), plain, rtol=0.1, atol=1e-2)


def test_constants_of_no_mesh_part_no_group(args: Any) -> None:
    """The 1 of `1 - sigmoid` is moved to the mesh of automatic axes that its operand is on."""

    def gated(weights: jax.Array, x: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.nn.silu(x @ w + w[0]) @ w.T
        return (x**2).mean()

    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    step = amp(jax.grad(gated), POLICY)
    alone, placed = (
        sum(e.primitive.name == "logistic" for e in equations(jax.make_jaxpr(step)(*given).jaxpr))
        for given in (args, jax.device_put(args, place))
    )
    assert alone == placed


def test_a_group_of_its_own_kind_is_no_call(args: Any) -> None:
    """Only what has several places pays for a jit around it."""
    jaxpr = jax.make_jaxpr(amp(lambda w, x: layer(x, w[0]), POLICY))(*args).jaxpr
    assert len(groups(jaxpr)) == 1
    assert shared_groups(jaxpr) == []


def test_what_only_moves_values_is_no_group(args: Any) -> None:
    """Transposes and reshapes between products keep their format: nothing is computed again."""

    def moved(w: jax.Array, x: jax.Array) -> jax.Array:
        return (x @ w[0]).T.reshape(TOKENS, WIDTH) @ w[1]

    jaxpr = jax.make_jaxpr(amp(moved, POLICY))(*args).jaxpr
    assert groups(jaxpr) == []
    assert [v.aval.dtype for e in jaxpr.eqns for v in e.outvars].count(jnp.float32) <= 1


def lowered_for(platform: str, fn: Callable[..., Any], args: Any) -> str:
    return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def barrier_lines(platform: str, fn: Callable[..., Any], args: Any) -> list[str]:
    lines = lowered_for(platform, fn, args).splitlines()
    return [line for line in lines if "stablehlo.optimization_barrier" in line]


def barriers(fn: Callable[..., Any], args: Any, platform: str) -> int:
    return len(barrier_lines(platform, fn, args))


@pytest.fixture
def large() -> Any:
    """Shapes of what a GPU does not keep in its cache."""
    shapes = (LAYERS, 128, 128), (2048, 128)
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def windows(x: jax.Array, w: jax.Array, steps: int) -> jax.Array:
    """Windows that lose a column and gain one."""
    for _ in range(steps):
        x = jnp.concatenate([x[:, 1:], jnp.tanh(x @ w)[:, :1]], axis=1)
    return x.sum()


def reflections(x: jax.Array, w: jax.Array, steps: int) -> jax.Array:
    """Rows that are reflected, each time by a sum over them."""
    for i in range(steps):
        v = w[i % len(w)]
        x = x - 2 * (x @ v)[:, None] * v / (v @ v)
    return (x @ w).mean()


@pytest.mark.parametrize("written_out", [windows, reflections])
def test_a_recurrence_that_is_written_out_is_recomputed_in_part(
    written_out: Callable[..., jax.Array],
) -> None:
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 256), (256, 256))]

    def size(steps: int) -> int:
        gradient = amp(jax.grad(lambda x, w: written_out(x, w, steps), (0, 1)), POLICY)
        return len(list(equations(jax.make_jaxpr(gradient)(*args).jaxpr)))

    few, twice, four_times = map(size, (32, 64, 128))
    assert four_times - twice < 2.2 * (twice - few)


def test_groups_have_no_barriers_on_tpu(large: Any) -> None:
    """There the compiler decides what is computed again; a user's own checkpoint keeps its say."""
    args = large
    mixed = jax.grad(amp(written_out, POLICY))
    assert [barriers(mixed, args, p) > 0 for p in ("cpu", "cuda", "tpu")] == [True, True, False]
    kept = [
        barriers(jax.grad(jax.checkpoint(fn)), args, "tpu")
        for fn in (amp(written_out, POLICY), written_out)
    ]
    assert kept[0] == kept[1] > 0


def test_what_fits_a_cache_has_no_barriers_on_gpu(args: Any, large: Any) -> None:
    """There a kernel costs more than memory traffic."""
    mixed = jax.grad(amp(written_out, POLICY))
    assert [barriers(mixed, given, "cuda") > 0 for given in (args, large)] == [False, True]


def test_a_barriered_value_is_a_rounding_on_tpu(large: Any) -> None:
    """What reads it may be computed in the kernel that makes it, and there are no barriers."""
    args = large
    mixed = amp(jax.grad(written_out), POLICY)
    emitted = {id(e): e for e in equations(jax.make_jaxpr(mixed)(*args).jaxpr)}  # shared ones once
    found = Counter(e.primitive.name for e in emitted.values())
    assert found["recomputation_barrier"]
    assert (
        barriers(mixed, args, "tpu")
        == 0
        < found["rounding_barrier"]
        < barriers(mixed, args, "cuda")
    )
    roundings = re.findall(r"reduce_precision .* format = e8m7 .*", lowered_for("tpu", mixed, args))
    assert len(roundings) == found["rounding_barrier"]
    assert all(line.endswith("bf16>") for line in roundings)


def test_a_barriered_value_in_float16_is_behind_a_barrier_on_tpu(large: Any) -> None:
    """To round it once more would make zeros of its smallest numbers."""
    lines = barrier_lines("tpu", amp(jax.grad(written_out), "auto_mixed"), large)
    assert lines
    assert all(line.endswith("f16>") for line in lines)


def forward_of(mixed: Callable[..., Any]) -> Callable[..., Any]:
    """What runs before the cotangent is there: the value, and what the backward pass reads."""
    return lambda weights, x: jax.vjp(mixed, weights, x)


def test_forward_passes_in_a_loop_have_no_barriers_on_gpu(large: Any) -> None:
    """To JAX they are differentiated checkpoints; nothing is computed again in them."""
    args = large

    def uncast(weights: jax.Array, x: jax.Array) -> jax.Array:
        step = jax.checkpoint(lambda x, w: (layer(x, w), None))
        return jax.lax.scan(step, x, weights)[0].sum()

    forward = forward_of(amp(uncast, POLICY))
    assert [barriers(forward, args, p) for p in ("cpu", "cuda")] == [1, 0]
    backward = jax.grad(amp(uncast, POLICY))
    assert barriers(backward, args, "cuda") == barriers(backward, args, "cpu") - 1


@pytest.mark.parametrize("saves", ["everything_saveable", "dots_saveable"])
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
def test_a_policy_of_a_users_checkpoint_saves_what_a_plan_stores(
    args: Any, saves: str, order: str
) -> None:
    """Not the float32 insides of groups; and what JAX rounds as float32 is no other value."""

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        policy = getattr(jax.checkpoint_policies, saves)
        step = jax.checkpoint(lambda x, w: (jax.nn.softmax(x @ w), None), policy=policy)
        return (jax.lax.scan(step, x @ weights[0], weights)[0] @ weights[0])[:, 0].mean()

    mixed = jax.grad(amp(loss, POLICY)) if order == "grad(amp(f))" else amp(jax.grad(loss), POLICY)
    jaxpr = jax.make_jaxpr(mixed)(*args).jaxpr
    forward, _ = [e for e in equations(jaxpr) if e.primitive.name == "scan"]
    types: Any = [v.aval for v in forward.outvars]
    assert {str(t.dtype) for t in types if t.shape == (LAYERS, TOKENS, WIDTH)} == {"bfloat16"}
    plain = jax.grad(loss)(*args)
    error = jnp.linalg.norm(mixed(*args) - plain) / jnp.linalg.norm(plain)
    assert error < 4 * jnp.finfo(jnp.bfloat16).eps


def behind_barriers(fn: Callable[..., Any], args: Any) -> set[str]:
    """Types of what stands behind barriers in the program for a GPU."""
    lines = barrier_lines("cuda", fn, args)
    return {word for line in lines for word in re.findall(r"tensor<(\S+)>", line)}


@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
def test_only_what_is_large_stands_behind_barriers_on_gpu(order: str) -> None:
    """Scales and statistics of rows stay in the kernels that make and read them."""
    rows, width = 4096, 64

    def normed(scale: jax.Array, weights: jax.Array, x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(layer(x * scale, w)) * scale
        return (x @ weights[0]).sum()

    mixed = jax.grad(amp(normed, POLICY)) if order[0] == "g" else amp(jax.grad(normed), POLICY)
    shapes = (width,), (LAYERS, width, width), (rows, width)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert behind_barriers(mixed, args) == {f"{rows}x{width}xbf16"}


@pytest.mark.parametrize(("axis", "behind"), [(1, 1), (0, 2)])
def test_cotangents_folded_over_rows_have_no_barrier_on_gpu(axis: int, behind: int) -> None:
    """What is folded over columns is read once more after that, and so has to be in memory."""

    def centred(w: jax.Array, x: jax.Array) -> jax.Array:
        h = x @ w
        normed = h * jax.lax.rsqrt(jnp.mean(h * h, axis, keepdims=True) + 1e-5)
        return (normed @ w).sum()

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (4096, 64))]
    lines = barrier_lines("cuda", jax.grad(amp(centred, POLICY)), shapes)
    assert max(line.count("tensor<4096x64xbf16>") for line in lines) == behind


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.silu])
def test_cotangents_that_a_bias_alone_adds_up_have_no_barrier_on_gpu(activation: Any) -> None:
    """What two readers of an activation send back is added up in the kernel of its mask."""

    def branched(b: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
        hidden = activation(x @ w + b)
        return jax.nn.relu(hidden @ w).sum() + jax.nn.relu(hidden @ w.T).sum()

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64,), (64, 64), (4096, 64))]
    lines = barrier_lines("cuda", jax.grad(amp(branched, POLICY)), shapes)
    assert max(line.count("tensor<4096x64xbf16>") for line in lines) == 1


@pytest.mark.parametrize(("of_sum", "roundings", "cotangents"), [(True, 1, 2), (False, 1, 0)])
def test_only_the_cotangent_of_a_sum_has_a_barrier_on_gpu(
    of_sum: bool, roundings: int, cotangents: int
) -> None:
    """What makes any other value adds up its cotangent in the kernel of its backward pass."""

    def gated(b: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
        start = x @ w
        hidden = start + (jnp.tanh(start) @ w + b) if of_sum else jax.nn.silu(start)
        return ((hidden * jax.nn.sigmoid(hidden @ w[:, :1])) @ w).sum()

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64,), (64, 64), (4096, 64))]
    mixed = jax.grad(amp(gated, POLICY), 1)
    lines = barrier_lines("cuda", mixed, shapes)
    recomputed = sum("%arg" in line for line in lines)
    assert len(lines) - recomputed == roundings + cotangents


def test_reductions_of_long_rows_are_not_made_again() -> None:
    """Each is a kernel that reads the whole row."""

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return (jax.nn.logsumexp(x @ w, axis=-1) ** 2).mean()

    def count(words: int) -> int:
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16), (16, words))]
        jaxpr = jax.make_jaxpr(jax.grad(amp(loss, POLICY)))(*args).jaxpr
        return sum(e.primitive.name in ("reduce_max", "reduce_sum") for e in equations(jaxpr))

    assert count(2**10) == 5
    assert count(2**15) == 3


@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
@pytest.mark.parametrize("has_gate", [True, False])
def test_what_is_elementwise_of_several_has_no_barrier_on_gpu(
    order: str, has_gate: bool, large: Any
) -> None:
    """Behind one, the parts of a product of joined matrices would be copied."""

    def gated(weights: jax.Array, x: jax.Array) -> jax.Array:
        gate, grow, shrink = weights
        hidden = jax.nn.silu(x @ gate)
        hidden = hidden * (x @ grow) if has_gate else jax.nn.silu(hidden @ grow)
        return (hidden @ shrink).sum()

    policy = PrecisionPolicy.parse(POLICY)
    without = policy.replace(xla=policy.xla - {Technique.RECOMPUTATION_BARRIERS})
    counts = [
        barriers(jax.grad(amp(gated, p)) if order[0] == "g" else amp(jax.grad(gated), p), large, on)
        for p in (policy, without)
        for on in ("cuda", "cpu")
    ]
    assert (counts[0] == counts[2]) is has_gate
    assert order[0] == "a" or counts[1] > counts[3]


def test_a_gate_beside_its_other_factor_has_no_barrier_on_gpu(large: Any) -> None:
    """Alone recomputed, it may be a part of the same product as the factor."""

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        gate, grow, shrink = weights
        return jnp.square((jax.nn.silu(x @ gate) * (x @ grow)) @ shrink).sum()

    def alone(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.square(jax.nn.silu(x @ weights[0]) @ weights[2]).sum()

    counts = [barriers(amp(jax.grad(fn), POLICY), large, "cuda") for fn in (loss, alone)]
    assert counts == [0, 1]
    wide = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 3072, 3072), (8192, 3072))]
    assert barriers(amp(jax.grad(loss), POLICY), wide, "cuda") == 1  # XLA joins no such products


@pytest.mark.parametrize("rows", [4096, 64])
def test_lookups_by_the_same_indices_are_not_one_kernel_on_gpu(rows: int) -> None:
    """Each layer's indices stand behind a barrier of their own, where rows are many."""

    def messages(weights: jax.Array, nodes: jax.Array, senders: jax.Array) -> jax.Array:
        for w in weights:
            nodes = jnp.tanh(nodes[senders] @ w)[: len(nodes)]
        return nodes.sum()

    shapes = ((LAYERS, 64, 64), "float32"), ((rows // 2, 64), "float32"), ((rows,), "int32")
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    lines = barrier_lines("cuda", jax.grad(amp(messages, POLICY)), args)
    assert sum("xi32>" in line for line in lines) == LAYERS * (rows * 64 >= 2**18)


def test_barriers_of_symbolic_sizes_are_around_everything() -> None:
    """Symbolic sizes cannot be compared; exported for a GPU, the program still runs on others."""
    rows = jax.export.symbolic_shape("n")[0]
    given = jnp.ones((LAYERS, WIDTH, WIDTH)), jnp.ones((TOKENS, WIDTH))
    shapes = given[0], jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    mixed = jax.jit(jax.grad(amp(written_out, POLICY)))
    exported = jax.export.export(mixed, platforms=("cuda", "cpu"))(*shapes)
    np.testing.assert_array_equal(exported.call(*given), mixed(*given))


def _standardized(x: jax.Array, axis: int) -> jax.Array:
    return (x - x.mean(axis, keepdims=True)) / jnp.sqrt(x.var(axis, keepdims=True) + 1e-5)


SIZED: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "bias": lambda w, x: jax.nn.silu(x @ w + w[0]) @ w + w[1],
    "batch_norm": lambda w, x: jax.nn.relu(_standardized(x @ w, 0)) @ w,
    "checkpoint": lambda w, x: jax.checkpoint(lambda x: _standardized(jax.nn.relu(x @ w) @ w, -1))(
        x
    ),
    "mean_of_words": lambda w, x: _standardized(x @ w, -1).mean(1, keepdims=True) @ w,
    "scores": lambda w, x: jax.nn.softmax(x @ w @ jnp.swapaxes(x, 1, 2)) @ x,
    "label": lambda w, x: jax.nn.log_softmax(x @ w)[..., :1],
}


@pytest.mark.product("name")
@pytest.mark.parametrize(("platform", "fused"), [("cuda", True), ("tpu", False)])
@pytest.mark.parametrize("name", SIZED)
def test_programs_of_symbolic_sizes_are_exported(name: str, platform: str, fused: bool) -> None:
    """For one platform alone, whose forms are chosen by sizes that cannot be compared."""
    policy = PrecisionPolicy.MIXED_BF16.replace(fused_attention=fused)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(SIZED[name](w, x) ** 2)

    shapes = (WIDTH, WIDTH), jax.export.symbolic_shape(f"b, t, {WIDTH}")
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    for fn in (amp(SIZED[name], policy), jax.grad(amp(loss, policy)), amp(jax.grad(loss), policy)):
        exported = jax.export.export(jax.jit(fn), platforms=(platform,))(*args)
        assert "bf16" in exported.mlir_module()


def test_residuals_of_activations_are_narrow(args: Any) -> None:
    """What `grad(amp(f))` keeps of activations for its backward pass is bfloat16."""
    _, backward = jax.vjp(lambda w: amp(written_out, POLICY)(w, args[1]), args[0])
    kept = [r for r in jax.tree.leaves(backward) if r.ndim and r.size >= TOKENS * WIDTH]
    wide = [r.shape for r in kept if r.dtype == jnp.float32 and r.shape == (TOKENS, WIDTH)]
    assert any(r.dtype == jnp.bfloat16 for r in kept)
    # The one of float32 is the activation that is squared for the loss.
    assert wide == [(TOKENS, WIDTH)]


def test_a_relu_is_kept_in_place_of_the_product_that_it_alone_reads(args: Any) -> None:
    """Its sign is its own mask, so that a perceptron keeps one array for each layer."""

    def perceptron(weights: jax.Array, biases: jax.Array, x: jax.Array) -> jax.Array:
        for w, b in zip(weights, biases, strict=True):
            x = jax.nn.relu(x @ w + b)
        return x.sum()

    weights, biases = args[0], jnp.ones((LAYERS, WIDTH))
    _, backward = jax.vjp(lambda w, b: amp(perceptron, POLICY)(w, b, args[1]), weights, biases)
    kept = [r for r in jax.tree.leaves(backward) if r.size == TOKENS * WIDTH]
    assert len(kept) == LAYERS + 1  # and the input


@pytest.mark.parametrize(("order", "barriers"), [("grad_of_amp", 2), ("amp_of_grad", 1)])
def test_the_sign_of_a_relu_of_a_product_is_that_of_its_result(
    args: Any, order: str, barriers: int
) -> None:
    """XLA would read that of the product, and store both; a barrier's transpose is another one."""

    def perceptron(weights: jax.Array, x: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.nn.relu(x @ w) @ w.T
        return x.sum()

    inside = jax.grad(amp(perceptron, POLICY))
    fn = inside if order == "grad_of_amp" else amp(jax.grad(perceptron), POLICY)
    primitives = [e.primitive.name for e in equations(jax.make_jaxpr(fn)(*args).jaxpr)]
    assert primitives.count("rounding_barrier") == barriers * LAYERS


@pytest.mark.parametrize(("columns", "kept"), [([WIDTH], 1), ([1], 0), ([1, WIDTH], 1)])
def test_a_relu_that_only_vectors_multiply_is_not_kept(
    args: Any, columns: list[int], kept: int
) -> None:
    """XLA adds up the terms in the kernel that computes them, from the product in memory."""

    def perceptron(weights: jax.Array, x: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(x @ weights[0] + weights[2, 0])
        return sum((hidden @ weights[1, :, :n]).sum() for n in columns)

    jaxpr = jax.make_jaxpr(jax.grad(amp(perceptron, POLICY)))(*args).jaxpr
    assert sum(e.primitive.name == "residual" for e in equations(jaxpr)) == kept


@pytest.mark.parametrize(("columns", "again"), [([WIDTH], 0), ([1], 1), ([1, WIDTH], 0)])
def test_a_relu_in_memory_is_read_by_later_groups(
    args: Any, columns: list[int], again: int
) -> None:
    """Made again, it would keep the product in memory beside it."""

    def perceptron(weights: jax.Array, x: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(x @ weights[0] + weights[2, 0])
        return sum(jax.nn.softplus(hidden @ weights[1, :, :n]).sum() for n in columns)

    jaxpr = jax.make_jaxpr(amp(jax.grad(perceptron), POLICY))(*args).jaxpr
    assert sum(e.params.get("name") == "relu" for e in equations(jaxpr)) == 1 + again


@pytest.mark.parametrize("curve", [jnp.tanh, jax.nn.sigmoid, jax.lax.erf])
@pytest.mark.parametrize("in_loop", [False, True])
def test_derivatives_of_a_curve_between_products_are_not_kept(
    args: Any, curve: Any, in_loop: bool
) -> None:
    """Nothing else shares its kernel; a loop would stack them in float32, two for a `tanh`."""

    def layers(weights: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return curve(x @ w) @ w.T, None

        if in_loop:
            return jax.lax.scan(layer, x, weights)[0].sum()
        return functools.reduce(lambda x, w: layer(x, w)[0], weights, x).sum()

    weights, x = args
    _, pull = jax.eval_shape(lambda w: jax.vjp(lambda w: amp(layers, POLICY)(w, x), w), weights)
    kept = [a.dtype for a in jax.tree.leaves(pull) if a.shape[-2:] == (TOKENS, WIDTH)]
    assert {*kept} == {jnp.dtype(jnp.bfloat16)}


def test_what_several_kernels_of_a_group_read_is_kept(args: Any) -> None:
    """A `gelu` before a norm of channels is in memory, and not made of its product again."""

    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jax.nn.gelu(x @ w[0])
        return (((y - y.mean(0)) * jax.lax.rsqrt(y.var(0) + 1e-5)) @ w[1]).sum()

    _, pull = jax.eval_shape(
        lambda w: jax.vjp(lambda w: amp(layer, POLICY)(w, args[1]), w), args[0]
    )
    kept = [a for a in jax.tree.leaves(pull) if a.shape == (TOKENS, WIDTH)]
    assert sum(a.dtype == jnp.bfloat16 for a in kept) == 3 + 1  # the input, product, gelu and norm


def test_the_backward_half_computes_activations_again(args: Any) -> None:
    """In `amp(grad(f))` the later group has the `tanh` of the earlier one, behind a barrier."""
    plain = jax.make_jaxpr(jax.grad(written_out))(*args)
    mixed = jax.make_jaxpr(amp(jax.grad(written_out), POLICY))(*args)
    before, after = (
        sum(e.primitive.name == "tanh" for e in equations(j.jaxpr)) for j in (plain, mixed)
    )
    assert after > before
    barriers = (
        e
        for group in groups(mixed.jaxpr)
        for e in equations(group.params["jaxpr"])
        if e.primitive.name == "recomputation_barrier"
    )
    assert any(len(e.invars) > 1 for e in barriers)  # of all that a group reads


def by_call(gate: jax.Array, up: jax.Array) -> jax.Array:
    """One cotangent is `silu(gate)` times another array: no group by itself."""
    return jax.nn.silu(gate) * up


def written_out_gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The cotangents share the sigmoid, and one of them the product besides."""
    return gate * jax.nn.sigmoid(gate) * up


def both_bent(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Each cotangent is a group by itself."""
    return jax.nn.silu(gate) * jnp.tanh(up)


@pytest.mark.parametrize("gated", [by_call, written_out_gate, both_bent])
def test_what_computes_the_same_again_has_one_barrier(args: Any, gated: Any) -> None:
    """Behind two of them the gate would be read twice; without, it would be kept in float32."""

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum((gated(x @ weights[0], x @ weights[1]) @ weights[2]) ** 2)

    gradient: Callable[..., Any] = jax.grad(loss, argnums=(0, 1))
    mixed = amp(gradient, POLICY)
    found = groups(jax.make_jaxpr(mixed)(*args).jaxpr)
    results = [v.aval.dtype for e in found for v in e.outvars if v.aval.shape == (TOKENS, WIDTH)]
    again = [
        e.params["recomputed"]
        for group in found
        for e in equations(group.params["jaxpr"])
        if e.primitive.name == "recomputation_barrier"
    ]
    assert len(again) == 1
    assert set(results) == {jnp.dtype(jnp.bfloat16)}
    for wanted, got in zip(gradient(*args), mixed(*args), strict=True):
        assert np.linalg.norm(got - wanted) < 0.02 * np.linalg.norm(wanted)


def test_a_bias_sums_the_cotangent_that_the_product_gets(args: Any) -> None:
    """The cotangent of `x @ w + b` is rounded once: no float32 copy goes through memory."""

    def biased(b: jax.Array, weights: jax.Array, x: jax.Array) -> jax.Array:
        return (jnp.tanh(x @ weights[0] + b) @ weights[1]).sum()

    jaxpr = jax.make_jaxpr(jax.grad(amp(biased, POLICY)))(jnp.ones(WIDTH), *args).jaxpr
    sums = list(sums_over_rows(jaxpr))
    assert sums
    assert all(maker == "unbarriered" for maker in sums), sums


def sums_over_rows(jaxpr: Jaxpr) -> Iterator[str]:
    """The primitives that make what is summed over the rows of an activation."""
    maker = {v: e.primitive.name for e in jaxpr.eqns for v in e.outvars}
    for eqn in jaxpr.eqns:
        is_sum = eqn.primitive.name == "reduce_sum" and eqn.params["axes"] == (0,)
        if is_sum and eqn.invars[0].aval.shape == (TOKENS, WIDTH):
            yield maker[eqn.invars[0]]
        for body in jaxprs_in_params(eqn.params):
            yield from sums_over_rows(body)


def test_a_stream_that_ends_in_a_difference_stays_f32(args: Any) -> None:
    """Its last value is compared with a target: a rounding would be a large part of the loss."""

    def fit(weights: jax.Array, x: jax.Array, target: jax.Array) -> jax.Array:
        step = jax.checkpoint(lambda x, w: (x + 0.1 * layer(x, w), None))
        return ((jax.lax.scan(step, x, weights)[0] - target) ** 2).mean()

    weights, x = args
    target = x + 0.01
    wanted = fit(weights, x, target)
    assert abs(amp(fit, POLICY)(weights, x, target) - wanted) < 2e-3 * wanted
    carries = [e.outvars[0].aval.dtype for e in scans(jax.make_jaxpr(amp(fit))(weights, x, target))]
    assert carries == [jnp.float32]


def test_a_stream_of_cotangents_that_ends_in_sums_is_narrow(args: Any) -> None:
    """Backward through layers, down to a table of embeddings: its gradient adds up rows."""

    def fit(table: jax.Array, weights: jax.Array) -> jax.Array:
        step = jax.checkpoint(lambda x, w: (x + layer(x, w), None))
        rows = table[jnp.arange(TOKENS) % 4]
        return (jax.lax.scan(step, rows, weights)[0] @ weights[0]).sum()

    jaxpr = jax.make_jaxpr(amp(jax.grad(fit), POLICY))(jnp.ones((4, WIDTH)), args[0])
    shape = (TOKENS, WIDTH)
    carries = [v.aval.dtype for e in scans(jaxpr) for v in e.outvars if v.aval.shape == shape]
    assert len(carries) == 2  # forward and backward
    assert set(carries) == {jnp.dtype(jnp.bfloat16)}


def scans(closed: Any) -> list[JaxprEqn]:
    return [e for e in equations(closed.jaxpr) if e.primitive.name == "scan"]


def crossing(outer: Jaxpr) -> Iterator[tuple[JaxprEqn, Any]]:
    """Arrays made of no input that a scan's body reads, with the equation that made them."""
    constant: dict[Any, JaxprEqn] = {}
    for eqn in outer.eqns:
        if all(isinstance(v, Literal) or v in constant for v in eqn.invars) and not eqn.effects:
            constant.update(dict.fromkeys(eqn.outvars, eqn))
        if eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            used = {v for e in body.eqns for v in e.invars if not isinstance(v, Literal)}
            for operand, inner in zip(eqn.invars, body.invars, strict=True):
                if not isinstance(operand, Literal) and operand in constant and inner in used:
                    yield constant[operand], inner.aval
        for body in jaxprs_in_params(eqn.params):
            yield from crossing(body)


def of_matrices(found: Iterator[tuple[JaxprEqn, Any]]) -> list[Any]:
    return [aval for _, aval in found if aval.shape == (TOKENS, TOKENS)]


def test_a_loop_makes_its_masks(args: Any) -> None:
    """JAX moves the mask and its filling out of the loop; the rewritten body makes them again."""
    gradient: Callable[..., Any] = jax.grad(masked_scan)
    assert of_matrices(crossing(jax.make_jaxpr(gradient)(*args).jaxpr))
    assert not of_matrices(crossing(jax.make_jaxpr(amp(gradient, POLICY))(*args).jaxpr))


def test_masks_made_in_a_loop_are_the_same(args: Any) -> None:
    """With another mask the gradient would be off by tens of percent."""
    wanted = np.asarray(jax.grad(masked_scan)(*args))
    found = np.asarray(amp(jax.grad(masked_scan), POLICY)(*args))
    assert np.linalg.norm(found - wanted) < 0.02 * np.linalg.norm(wanted)


def by_squares(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance in one pass, as flax's norms have them."""
    mean = x.mean(-1, keepdims=True)
    return mean, (x * x).mean(-1, keepdims=True) - mean * mean


def by_differences(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean first, then the variance, which XLA makes one kernel with what reads them."""
    mean = x.mean(-1, keepdims=True)
    return mean, ((x - mean) ** 2).mean(-1, keepdims=True)


@pytest.mark.parametrize(
    ("statistics", "scale", "tokens", "again"),
    [
        (by_squares, 1.0, TOKENS, 0),
        (by_squares, np.ones(WIDTH, np.float32), 8192, 0),
        (by_differences, 1.0, TOKENS, 2),
        (by_differences, np.ones(WIDTH, np.float32), 8192, 0),
        (by_differences, np.ones(WIDTH, np.float32), TOKENS, 2),
        (by_differences, np.ones((8192, 1), np.float32), 8192, 2),
    ],
    ids=[
        "by squares",
        "scaled by squares",
        "by differences",
        "scaled",
        "few scaled",
        "of scaled rows",
    ],
)
def test_folds_that_share_a_pass_are_kept(
    args: Any, statistics: Any, scale: Any, tokens: int, again: int
) -> None:
    """Other folds of rows are computed again in the backward pass, where they cost nothing.

    Under a vector along many rows they would: its gradient is a pass of its own.
    """

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        hidden = x @ w
        mean, variance = statistics(hidden)
        normed = (hidden - mean) * jax.lax.rsqrt(variance + 1e-5) * scale
        return jnp.sum(normed @ w.T @ w)

    w, x = args[0][0], jnp.ones((tokens, WIDTH))
    jaxpr = jax.make_jaxpr(amp(jax.grad(loss), POLICY))(w, x).jaxpr
    plain = jax.make_jaxpr(jax.grad(loss))(w, x).jaxpr
    folds = [sum(e.primitive.name == "reduce_sum" for e in equations(j)) for j in (plain, jaxpr)]
    assert folds[1] - folds[0] == again


def test_no_square_is_stored_to_be_summed_again(args: Any) -> None:
    """A residual stream of float32 is updated state: the backward pass reads what it has stored."""

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        x = x + x @ w
        normed = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return jnp.sum((x + jnp.tanh(normed @ w)) ** 2)

    w, x = args[0][0], args[1]
    jaxpr = jax.make_jaxpr(amp(jax.grad(loss, argnums=(0, 1)), POLICY))(x, w).jaxpr
    squares = [
        result
        for group in groups(jaxpr)
        for eqn in group.params["jaxpr"].eqns
        for result in group.params["jaxpr"].outvars
        if result in eqn.outvars and (eqn.invars[0] is eqn.invars[-1])
        if eqn.primitive.name in ("mul", "square", "integer_pow")
    ]
    assert not squares


def test_statistics_over_a_vmapped_axis_part_no_group(args: Any) -> None:
    """What vmap makes of a psum is a sum like any other: batch norms are one group either way."""

    def normed(hidden: jax.Array, mean: Callable[[jax.Array], jax.Array]) -> jax.Array:
        centred = hidden - mean(hidden)
        return centred * jax.lax.rsqrt(mean(centred**2) + 1e-5)

    def by_axis(w: jax.Array, x: jax.Array) -> jax.Array:
        return normed(x @ w, lambda v: v.mean(0)) @ w

    def by_name(w: jax.Array, x: jax.Array) -> jax.Array:
        def over_rows(v: jax.Array) -> jax.Array:
            return jax.lax.pmean(v, "rows")

        return jax.vmap(lambda row: normed(row @ w, over_rows) @ w, axis_name="rows")(x)

    w, x = args[0][0], args[1]
    counts = [len(groups(jax.make_jaxpr(amp(fn, POLICY))(w, x).jaxpr)) for fn in (by_axis, by_name)]
    assert counts == [1, 1]


def test_what_is_stored_of_a_custom_derivative_is_held(args: Any) -> None:
    """The rule that JAX takes instead of the body does not undo the rounding of what it gives."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(x + x @ w)
        return jnp.sum(jax.nn.relu(y + y @ w) @ w)

    def forward(w: jax.Array, x: jax.Array) -> Any:
        return jax.vjp(lambda w: amp(loss, POLICY)(w, x), w)[0]

    jaxpr = jax.make_jaxpr(forward)(args[0][0], args[1]).jaxpr
    held: list[Any] = [
        e.invars[0].aval for e in equations(jaxpr) if e.primitive.name == "rounding_barrier"
    ]
    assert any(a.shape == args[1].shape and a.dtype == jnp.bfloat16 for a in held)


@pytest.mark.parametrize(
    ("activation", "held"),
    [(jax.nn.softplus, 1), (lambda x: jnp.logaddexp(x, 0.0), 1), (jax.nn.silu, 0)],
    ids=["called", "written_out", "computed_again"],
)
def test_what_a_called_function_saves_for_another_is_held(
    activation: Any, held: int, args: Any
) -> None:
    """`softplus` hands on its derivative in float32, and its backward pass rounds it.

    XLA took the rounding away, and stored it so. That of `silu` is computed again.
    """

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(activation(activation(x @ w) @ w) @ w)

    jaxpr = jax.make_jaxpr(amp(jax.grad(loss), POLICY))(args[0][0], args[1]).jaxpr
    assert [e.primitive.name for e in equations(jaxpr)].count("rounding_barrier") == held


def test_stacked_inputs_of_products_are_narrow() -> None:
    """A stream that stays float32 is stacked in bfloat16 where only products read the stack."""

    def stream(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)[0].sum()

    args = jnp.ones((LAYERS, WIDTH, WIDTH)), jnp.ones((TOKENS, WIDTH))
    jaxpr = jax.make_jaxpr(amp(jax.grad(stream), POLICY))(*args).jaxpr
    forward = next(e for e in equations(jaxpr) if e.primitive.name == "scan")
    carried, *stacked = (v.aval for v in forward.outvars)
    assert carried.dtype == jnp.float32
    assert {a.dtype for a in stacked} == {jnp.dtype(jnp.bfloat16)}


def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def batch_normed(x: jax.Array) -> jax.Array:
    centred = x - x.mean((0, 1, 2))
    return centred * jax.lax.rsqrt((centred * centred).mean((0, 1, 2)) + 1e-5)


def densely_connected(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Every layer reads what all layers before it have made."""
    for w in weights[:-1]:
        new = convolved(jax.nn.relu(batch_normed(x)) if x.shape[-1] > 3 else x, w)
        x = jnp.concatenate([x, new], -1) if x.shape[-1] > 3 else new
    return (convolved(jax.nn.relu(batch_normed(x)), weights[-1]) ** 2).mean()


@pytest.fixture
def dense() -> tuple[list[jax.Array], jax.Array]:
    keys = iter(jax.random.split(jax.random.key(0), 6))
    shapes = [(3, 3, 3, 8), (3, 3, 8, 4), (3, 3, 12, 4), (3, 3, 16, 4), (1, 1, 20, 2)]
    weights = [jax.random.normal(next(keys), s) / (s[0] * s[1] * s[2]) ** 0.5 for s in shapes]
    return weights, jax.random.normal(next(keys), (2, 8, 8, 3))


def gradient_of(fn: Callable[..., Any], order: str) -> Callable[..., Any]:
    is_inside = order == "amp(grad(f))"
    return amp(jax.grad(fn), POLICY) if is_inside else jax.grad(amp(fn, POLICY))


def images(jaxpr: Jaxpr) -> list[Any]:
    """The types of the images that groups read."""
    read: list[Any] = [v.aval for group in groups(jaxpr) for v in group.invars]
    return [aval for aval in read if aval.ndim == 4]


@pytest.mark.parametrize("fn", [densely_connected, jax.grad(densely_connected)])
def test_what_lies_side_by_side_is_not_stored(dense: Any, fn: Callable[..., Any]) -> None:
    """No group hands a concatenation to another: each reads the parts, which are in memory."""
    jaxpr = jax.make_jaxpr(amp(fn, POLICY))(*dense).jaxpr
    assert {8, 4} <= {array.shape[-1] for array in images(jaxpr)}
    made = [
        maker.primitive.name
        for group in groups(jaxpr)
        for maker in group.params["jaxpr"].eqns
        if {*maker.outvars} & {*group.params["jaxpr"].outvars}
        and any(getattr(v.aval, "ndim", 0) == 4 for v in maker.outvars)
    ]
    assert made
    assert not {"concatenate", "name"} & {*made}


def test_a_concatenation_that_a_kernel_reads_is_stored(dense: Any) -> None:
    """It is written in any case, and read again as a whole."""
    weights, x = dense

    def joined(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        new = convolved(x, weights[0])
        both = jnp.concatenate([new, convolved(jax.nn.relu(batch_normed(new)), weights[1])], -1)
        again = convolved(jax.nn.relu(batch_normed(both)), weights[2])
        return ((convolved(both, weights[2]) + again) ** 2).mean()

    jaxpr = jax.make_jaxpr(amp(joined, POLICY))(weights, x).jaxpr
    found = [e for e in equations(jaxpr) if e.primitive.name == "concatenate"]
    assert len(found) == 1


@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
def test_the_largest_of_rounded_numbers_is_rounded(dense: Any, order: str) -> None:
    """A window picks stored numbers: neither they nor its cotangents are widened for it."""
    weights, x = dense

    def pooled(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        x = jax.nn.relu(batch_normed(convolved(x, weights[0])))
        window = (1, 2, 2, 1)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "SAME")
        return (convolved(jax.nn.relu(batch_normed(x)), weights[1]) ** 2).mean()

    jaxpr = jax.make_jaxpr(gradient_of(pooled, order))(weights, x).jaxpr
    names = ("reduce_window_max", "select_and_scatter_add")
    windows = [e for e in equations(jaxpr) if e.primitive.name in names]
    assert {e.primitive.name for e in windows} == {*names}
    avals: list[Any] = [v.aval for e in windows for v in (*e.invars, *e.outvars)]
    assert {str(aval.dtype) for aval in avals} == {"bfloat16"}


def test_masks_that_are_combined_are_made_again(dense: Any) -> None:
    """`and` of two comparisons is fused like either: nothing large but products is read later."""
    weights, x = dense

    def clipped(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        x = jax.nn.hard_swish(batch_normed(convolved(x, weights[0])))
        return (convolved(x, weights[1]) ** 2).mean()

    jaxpr = jax.make_jaxpr(amp(jax.grad(clipped), POLICY))(weights, x).jaxpr
    read = {str(array.dtype) for array in images(jaxpr) if array.size > 512}
    assert read == {"bfloat16"}


@pytest.mark.product("curve")
@pytest.mark.parametrize("curve", [jax.nn.leaky_relu, jax.nn.hard_swish, jax.nn.silu])
@pytest.mark.parametrize("learnt", [operator.add, operator.mul])
@pytest.mark.parametrize("over", ["all", "image", "row"])
def test_cotangents_behind_a_norm_are_rounded_once(
    dense: Any, curve: Any, learnt: Any, over: str
) -> None:
    """Before a norm of all rows where several read it, before others where that is costly."""
    weights, x = dense
    axes = {"all": (0, 1, 2), "image": (1, 2), "row": -1}[over]

    def curved(b: jax.Array, weights: list[jax.Array], x: jax.Array) -> jax.Array:
        normed = jax.nn.standardize(convolved(x, weights[0]), axes)
        return (convolved(curve(learnt(normed, b)), weights[1]) ** 2).mean()

    b = jnp.full(8, 0.5)
    jaxpr = jax.make_jaxpr(amp(curved, POLICY))(b, weights, x).jaxpr
    echoes = [e.params["of"] for e in equations(jaxpr) if e.primitive.name == "rounded_cotangent"]
    assert [of.held for of in echoes] == [()] * (over == "all" or curve is jax.nn.silu)
    mixed = jax.grad(amp(curved, POLICY), 1)(b, weights, x)
    for found, plain in zip(mixed, jax.grad(curved, 1)(b, weights, x), strict=True):
        assert jnp.linalg.norm(found - plain) <= 0.1 * jnp.linalg.norm(plain)


def test_the_cotangent_behind_a_running_sum_is_not_rounded() -> None:
    """Nothing is reduced over rows, as behind a batch norm: quantiles and their pinball loss."""
    x, y = jnp.ones((TOKENS, 8)), jnp.arange(TOKENS)[:, None] / TOKENS
    tau = jnp.array([0.1, 0.5, 0.9])

    def pinball(b: jax.Array, w: jax.Array) -> jax.Array:
        steps = jax.nn.softplus(jnp.tanh(x @ w) @ w[:, :3] + b)
        rest = y - jnp.cumsum(steps, -1)
        return jnp.maximum(tau * rest, (tau - 1) * rest).mean()

    args = jnp.zeros(3), jnp.full((8, 8), 0.25)
    mixed, plain = jax.grad(amp(pinball, POLICY))(*args), jax.grad(pinball)(*args)
    assert jnp.abs(mixed - plain).max() <= 1e-3 * jnp.abs(plain).max()


def filtered(w: jax.Array, x: jax.Array) -> jax.Array:
    """Three taps along the words."""
    padded = jnp.pad(x @ w[1], ((2, 0), (0, 0)))
    return sum((padded[i : i + TOKENS] * w[0, i] for i in range(1, 3)), padded[:TOKENS] * w[0, 0])


def added(w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ w[0] + jnp.tanh(x) @ w[1]


def residual(w: jax.Array, x: jax.Array) -> jax.Array:
    """A stream that the second product depends on."""
    x = x @ w[0]
    return x + jnp.tanh(x) @ w[1]


@pytest.mark.parametrize(("fn", "roundings"), [(filtered, 1), (added, 1), (residual, 0)])
def test_the_cotangent_of_a_sum_of_products_is_rounded_once(
    args: Any, fn: Any, roundings: int
) -> None:
    """All that the products are made of take it from memory, and so do sums over rows."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return ((jax.nn.relu(fn(w, x)) @ w[2]) ** 2).mean()

    jaxpr = jax.make_jaxpr(amp(loss, POLICY))(*args).jaxpr
    echoes = [e.params["of"] for e in equations(jaxpr) if e.primitive.name == "rounded_cotangent"]
    assert [of.held for of in echoes] == [(0, 1)] * roundings
    mixed, plain = jax.grad(amp(loss, POLICY))(*args), jax.grad(loss)(*args)
    assert jnp.linalg.norm(mixed - plain) <= 0.02 * jnp.linalg.norm(plain)


@pytest.mark.parametrize("looked_up", [False, True])
def test_the_cotangent_of_scores_is_rounded_once_for_their_bias(
    args: Any, *, looked_up: bool
) -> None:
    """A bias that all rows share, of activations or of a table, adds up what the product takes."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        scores = x.reshape(2, -1, x.shape[-1]) @ w[0]
        shared = w[1][jnp.arange(scores.shape[1]) % 8] + w[2][0] if looked_up else scores[0] @ w[1]
        return ((jax.nn.softmax(scores + shared) @ w[2]) ** 2).mean()

    jaxpr = jax.make_jaxpr(amp(loss, POLICY))(*args).jaxpr
    echoes = sum(e.primitive.name == "rounded_cotangent" for e in equations(jaxpr))
    assert echoes == looked_up  # of activations the sum is stored, and its cotangent rounded so
    mixed, plain = jax.grad(amp(loss, POLICY))(*args), jax.grad(loss)(*args)
    assert jnp.linalg.norm(mixed - plain) <= 0.02 * jnp.linalg.norm(plain)


def test_what_a_rule_solves_with_is_known_before_its_tangents(args: Any) -> None:
    """One group makes the matrix of a root's tangents and what is multiplied with these."""
    w = args[0][0]

    def loss(x: jax.Array) -> jax.Array:
        def distance(z: jax.Array) -> jax.Array:
            return z - 0.5 * jnp.tanh(jnp.tanh(z.reshape(2, -1) @ w) @ w.T).reshape(-1) - x

        def solve(f: Any, z: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, 9, lambda _, z: z - f(z), z)

        def solve_tangents(f: Any, y: jax.Array) -> jax.Array:
            return jnp.linalg.solve(jax.jacobian(f)(y), y)

        return (jax.lax.custom_root(distance, x, solve, solve_tangents) ** 2).sum()

    made = jax.make_jaxpr(jax.grad(amp(loss, POLICY)))(jnp.ones(2 * len(w)))
    assert sum(e.primitive.name == "triangular_solve" for e in equations(made)) == 4


@pytest.mark.parametrize(("axis", "times"), [(-1, 1), (0, 2)])
def test_a_sum_of_rows_that_a_later_kernel_reads_is_not_made_again(axis: int, times: int) -> None:
    """A penalty on activations is added up where they are made, not where the loss is."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 256, 256), (256, 256))]

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        h = jax.nn.relu(x @ w[0] + x[0])
        return (jnp.square(h @ w[1] - x).sum(axis) + jnp.abs(h).sum(axis)).mean()

    jaxpr = jax.make_jaxpr(amp(loss, POLICY))(*shapes).jaxpr
    assert sum(e.primitive.name == "abs" for e in equations(jaxpr)) == times
