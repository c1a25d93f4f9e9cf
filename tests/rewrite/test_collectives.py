"""What travels between devices in which precision, in programs that move arrays by hand."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core.primitives import copy_p
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.collectives.count import collectives
from jaxamp import Precision, PrecisionPolicy, Rule, amp, plan_of
from jaxamp.compiled import hlo
from jaxamp.rewrite.primitives.narrow_collective import Sending, send_narrow
from tests.audit import PRODUCTS, equations

BF16 = PrecisionPolicy.AUTO_MIXED_BF16
SENT = re.compile(
    r'"stablehlo\.(all_gather|all_reduce|reduce_scatter|collective_permute)"'
    r".*?-> \(?tensor<([0-9x]*x)?(\w+)>",
    re.DOTALL,
)
W = np.linspace(-1, 1, 64 * 32, dtype="f").reshape(64, 32)
X = np.linspace(-2, 1, 16 * 64, dtype="f").reshape(16, 64)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))


def sent(fn, *args):
    """Collectives of a program by name and dtype; scalars are left out."""
    text = jax.jit(fn).lower(*args).as_text()
    return Counter((name, dtype) for name, shape, dtype in SENT.findall(text) if shape)


def loss_fn(w, x, to="varying"):
    """A loss of a product with a parameter that is gathered first."""
    return jnp.mean(jnp.square(x @ lax.all_gather(w, "d", tiled=True, to=to)))


ORDERS = {
    "grad of amp": lambda wrap, fn, policy: wrap(jax.grad(amp(fn, policy))),
    "amp of grad": lambda wrap, fn, policy: amp(wrap(jax.grad(fn)), policy),
}
orders = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


def split(mesh, fn, check_vma=True):
    """The function over parts of the parameter and of the batch."""
    specs = (P("d"), P("d"))
    return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P("d"), check_vma=check_vma)


@orders
@pytest.mark.parametrize(
    ("to", "check_vma"), [("varying", True), ("varying", False), ("reduced", True)]
)
@pytest.mark.parametrize(
    ("policy", "low", "back"),
    [
        (BF16, "bf16", "f32"),
        (PrecisionPolicy.AUTO_MIXED, "f16", "f32"),
        (BF16.replace(allreduce="bf16"), "bf16", "bf16"),
    ],
    ids=["bf16", "f16", "sums in bf16"],
)
def test_a_gathered_parameter_travels_low(mesh, order, to, check_vma, policy, low, back):
    """The gather is in the low precision, its transpose in that of the policy, both orders."""
    step = order(partial(split, mesh, check_vma=check_vma), partial(loss_fn, to=to), policy)
    found = sent(step, W, X)
    assert found["all_gather", low] == 1
    assert found["reduce_scatter", back] == 1
    assert found.total() == 2


@orders
def test_gradients_are_those_of_a_gather_in_f32(mesh, order):
    """Rounding before the gather gives, bit for bit, what rounding after it gives.

    So each device's part of a gradient is an f32 accumulator when it is added to the others'.
    """
    after = BF16.with_rules(Rule(primitive="all_gather", precision="f32"))
    steps = [order(partial(split, mesh), loss_fn, policy) for policy in (BF16, after)]
    assert [sent(step, W, X)["all_gather", "bf16"] for step in steps] == [1, 0]
    early, late = (jax.jit(step)(W, X) for step in steps)
    assert early.dtype == jnp.float32
    np.testing.assert_array_equal(early, late)
    assert (early != early.astype(jnp.bfloat16).astype(jnp.float32)).any()


@orders
def test_words_of_a_gathered_table_add_up_in_f32(mesh, order):
    """A row that is looked up a hundred times keeps the gradient of every time."""
    table, words = jnp.ones((16, 8)), jnp.tile(jnp.arange(16), 8 * 512)

    def loss(table, words):
        rows = lax.all_gather(table, "d", tiled=True)[words]
        return jnp.sum(jnp.square(rows @ jnp.full((8, 4), 0.5)))  # of fours

    step = order(partial(split, mesh), loss, BF16)
    assert sent(step, table, words)["all_gather", "bf16"] == 1
    np.testing.assert_array_equal(jax.jit(step)(table, words), jnp.full((16, 8), 16.0 * 8 * 512))


SAVING = {
    "no checkpoint": lambda layer: layer,
    "nothing": jax.checkpoint,
    "gathers": partial(jax.checkpoint, policy=lambda prim, *_, **__: prim.name == "all_gather"),
    "products": partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable),
    "everything": partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable),
}


@pytest.mark.parametrize("save", SAVING.values(), ids=SAVING)
@pytest.mark.parametrize("gathered", ["inside", "outside"])
def test_no_gathered_parameter_waits_in_f32(mesh, save, gathered):
    """What the backward pass gets of it is narrow, whatever a checkpoint saves."""
    waiting = []

    def gather(w):
        return lax.all_gather(w, "d", tiled=True)

    def layer(x, w):
        return jnp.tanh(jnp.tanh(x @ (gather(w) if gathered == "inside" else w)))

    def loss(w, x):
        for _ in range(2):
            x = save(layer)(x, w if gathered == "inside" else gather(w))
        return jnp.sum(x)

    def residuals(w, x):
        waiting.extend(jax.tree.leaves(jax.vjp(lambda w: amp(loss)(w, x), w)[1]))
        return w

    square = jnp.ones((64, 64))
    jax.eval_shape(split(mesh, residuals, check_vma=False), square, X)
    dtypes = {leaf.dtype for leaf in waiting if leaf.shape == square.shape}
    assert dtypes <= {jnp.dtype("bfloat16")}


@orders
def test_a_rule_sends_low_and_leaves_the_way_back_alone(mesh, order):
    """Forced by a rule, where the plan would not: the gradients' sum is still the policy's."""

    def both(w, x):
        whole = lax.all_gather(w, "d", tiled=True)
        return jnp.mean(x @ whole) + jnp.sum(whole**2)

    forced = BF16.with_rules(Rule(primitive="all_gather", precision="bf16"))
    found = sent(order(partial(split, mesh), both, forced), W, X)
    assert (found["all_gather", "bf16"], found["reduce_scatter", "f32"]) == (1, 1)


def test_what_a_sum_reads_travels_whole(mesh):
    """A gather that anything reads in f32 stays f32: no number is rounded for others' sake."""

    def both(w, x):
        whole = lax.all_gather(w, "d", tiled=True)
        return jnp.mean(x @ whole) + jnp.sum(whole**2)

    found = sent(split(mesh, jax.grad(amp(both))), W, X)
    assert found["all_gather", "f32"] == 1
    assert found["all_gather", "bf16"] == 0


def deep(stacked, x):
    """Layers gathered one by one inside a scan, and again in the backward pass."""

    @partial(jax.checkpoint, policy=lambda prim, *_, **__: prim.name != "all_gather")
    def layer(x, w):
        return jnp.tanh(x @ lax.all_gather(w, "d", tiled=True)), None

    return jnp.mean(lax.scan(layer, x, stacked)[0] ** 2)


@orders
def test_layers_of_a_scan_are_gathered_low(mesh, order):
    """Twice, as the checkpoint policy, which sees the gather as it was, asks for."""
    stacked, x = jnp.ones((3, 64, 64)), jnp.ones((16, 64))

    def wrap(fn):
        specs = (P(None, "d"), P("d"))
        return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=specs[0])

    found = sent(order(wrap, deep, BF16), stacked, x)
    assert found["all_gather", "bf16"] == 2
    assert found["reduce_scatter", "f32"] == 1
    assert found.total() == 3


def test_cotangents_of_many_uses_meet_in_f32(mesh):
    """A parameter gathered once for a long loop: a thousand small gradients are not lost."""

    def loop(w, x):
        whole = lax.all_gather(w, "d", tiled=True)
        return lax.fori_loop(0, 1000, lambda _, total: total + jnp.mean(jnp.square(x @ whole)), 0.0)

    after = BF16.with_rules(Rule(primitive="all_gather", precision="f32"))
    early, late = (
        split(mesh, jax.grad(amp(loop, policy)), check_vma=False) for policy in (BF16, after)
    )
    assert sent(early, W, X) == {("all_gather", "bf16"): 1, ("reduce_scatter", "f32"): 1}
    expected = jax.jit(late)(W, X)
    np.testing.assert_allclose(
        jax.jit(early)(W, X), expected, atol=2.0**-9 * np.abs(expected).max()
    )


@orders
def test_gathers_under_vmap(mesh, order):
    """Several models at once: one gather of all of them, and gradients as one by one."""
    ws, xs = jnp.stack([W, W / 2, -W]), jnp.stack([X, X, X / 3])

    def wrap(fn):
        specs = (P(None, "d"), P(None, "d"))
        return jax.shard_map(jax.vmap(fn), mesh=mesh, in_specs=specs, out_specs=specs[0])

    step = order(wrap, loss_fn, BF16)
    found = sent(step, ws, xs)
    assert (found["all_gather", "bf16"], found["reduce_scatter", "f32"]) == (1, 1)
    alone = jax.jit(order(partial(split, mesh), loss_fn, BF16))
    expected = [alone(w, x) for w, x in zip(ws, xs, strict=True)]
    np.testing.assert_allclose(jax.jit(step)(ws, xs), jnp.stack(expected), rtol=1e-6)


def test_a_gather_over_the_axis_of_a_vmap():
    """Where the axis is vmap's own nothing is sent, and the numbers are those of bf16."""

    def fn(w, x):
        return x @ lax.all_gather(w, "i", tiled=True)

    ours = jax.vmap(amp(fn), axis_name="i")(W.reshape(8, 8, 32), X.reshape(8, 2, 64))
    np.testing.assert_array_equal(ours.reshape(16, 32), amp(jnp.dot)(X, W))


def test_second_derivatives_pass(mesh):
    """The primitive that sends is linear in every order of differentiation."""

    def along(w, x):
        return jax.jvp(lambda w: jax.grad(amp(loss_fn))(w, x), (w,), (w,))[1]

    f32 = split(mesh, lambda w, x: jax.jvp(lambda w: jax.grad(loss_fn)(w, x), (w,), (w,))[1])
    ours, exact = jax.jit(split(mesh, along))(W, X), jax.jit(f32)(W, X)
    np.testing.assert_allclose(ours, exact, atol=0.05 * np.abs(exact).max())


def mean_loss(w, x):
    """A data-parallel loss: the parameter is whole, the batch is split."""
    return lax.pmean(jnp.mean(jnp.square(x @ w)), "d")


@orders
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_gradients_are_added_up_in_the_policy_s_precision(mesh, order, dtype):
    """JAX's own sum over devices, put in by differentiation; f32 unless the policy says other."""

    def wrap(fn):
        return jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())

    step = order(wrap, mean_loss, BF16.replace(allreduce=dtype))
    assert sent(step, W, X) == {("all_reduce", dtype): 1}
    exact = jax.jit(wrap(jax.grad(mean_loss)))(W, X)
    ours = jax.jit(step)(W, X)
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, exact, atol=0.05 * np.abs(exact).max())


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_mean_of_gradients_by_hand(mesh, dtype):
    """What the step itself adds up: matrices in the policy's precision, vectors are f32 anyway."""

    def step(params, x):
        def loss(params):
            return jnp.mean(jnp.square(x @ params["w"] + params["b"]))

        return lax.pmean(jax.grad(loss)(params), "d")

    params = {"w": W, "b": jnp.ones(32)}
    specs = {"in_specs": (P(), P("d")), "out_specs": P(), "check_vma": False}
    mapped = amp(jax.shard_map(step, mesh=mesh, **specs), BF16.replace(allreduce=dtype))
    assert sent(mapped, params, X) == Counter([("all_reduce", dtype), ("all_reduce", "f32")])
    assert {leaf.dtype for leaf in jax.tree.leaves(mapped(params, X))} == {jnp.dtype("float32")}


@pytest.mark.parametrize(("policy", "dtype"), [("mixed_bf16", "bf16"), ("mixed_f16", "f32")])
def test_activations_are_added_up_as_they_are_stored(mesh, policy, dtype):
    """Tensor parallel, as what XLA partitions is; a sum may overflow f16, and meets in f32."""

    def fn(x, w, v):
        return lax.psum(x @ w, "d") @ v

    specs = (P(None, "d"), P("d"), P())
    mapped = jax.shard_map(amp(fn, policy), mesh=mesh, in_specs=specs, out_specs=P())
    assert sent(mapped, X, W, W[:32]) == {("all_reduce", dtype): 1}
    exact = np.asarray(X, np.float64) @ np.asarray(W, np.float64) @ np.asarray(W[:32], np.float64)
    error = np.abs(np.asarray(mapped(X, W, W[:32])) - exact).max()
    assert error < 0.02 * np.abs(exact).max()


@pytest.mark.product("order")
@orders
@pytest.mark.parametrize(("policy", "dtype"), [("mixed_bf16", "bf16"), ("mixed_f16", "f32")])
def test_cotangents_of_normed_activations_are_added_up_as_they_are_stored(
    mesh, order, policy, dtype
):
    """A norm is computed in f32 and its results vary; the gradient of its scale is f32's sum."""

    def loss(params, x):
        before = x @ params["in"]
        normed = before * lax.rsqrt(jnp.mean(before**2, -1, keepdims=True)) * params["scale"]
        hidden = jnp.tanh(normed @ params["grow"])
        return jnp.mean(jnp.sinh(lax.psum(hidden @ params["shrink"], "d") @ params["in"]))

    square = jax.random.normal(jax.random.key(0), (3, 64, 64)) / 8
    params = {"in": square[0], "scale": jnp.ones(64), "grow": square[1], "shrink": square[2]}
    split = {"in": P(), "scale": P(), "grow": P(None, "d"), "shrink": P("d")}

    def wrap(fn):
        return jax.shard_map(fn, mesh=mesh, in_specs=(split, P()), out_specs=split)

    step = order(wrap, loss, PrecisionPolicy.parse(policy))
    assert sent(step, params, X) == {("all_reduce", dtype): 2}
    exact = jax.jit(wrap(jax.grad(loss)))(params, X)
    for name, ours in jax.jit(step)(params, X).items():
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, exact[name], atol=0.05 * np.abs(exact[name]).max())


@pytest.mark.parametrize("check_vma", [True, False])
def test_cotangents_of_activations_are_added_up_as_they_are_stored(mesh, check_vma):
    """Around a gradient: what goes back to the layers before, as what goes on to those after."""

    def step(x, a, w, v):
        def loss(a, w, v):
            before = _both_ways(jnp.sinh(x @ a))
            return jnp.sum(jnp.sinh(lax.psum(jnp.sinh(before @ w) @ v, "d") @ a))

        return jax.grad(loss, (0, 1, 2))(a, w, v)

    @jax.custom_vjp
    def _both_ways(x):
        return lax.pcast(x, "d", to="varying") if check_vma else x

    _both_ways.defvjp(lambda x: (_both_ways(x), None), lambda _, g: (lax.psum(g, "d"),))
    split = P(None, "d"), P("d")
    specs = {"in_specs": (P(), P(), *split), "out_specs": (P(), *split), "check_vma": check_vma}
    mapped = amp(jax.shard_map(step, mesh=mesh, **specs))
    back = {True: 1, False: 2}[check_vma]  # unchecked, the transpose of a sum is another one
    assert sent(mapped, X, W @ W.T / 32, W, W.T) == {("all_reduce", "bf16"): 1 + back}


def _own(table, words):
    """Places of words in this device's part of a table that is split by rows, and a mask."""
    places = words - lax.axis_index("d") * len(table)
    return places, (places >= 0) & (places < len(table))


def _chosen(table, words):
    places, is_own = _own(table, words)
    return jnp.where(is_own[..., None], table[jnp.where(is_own, places, 0)], 0)


def _multiplied(table, words):
    places, is_own = _own(table, words)
    return table[jnp.where(is_own, places, 0)] * is_own[..., None]


def _filled(table, words):
    places, is_own = _own(table, words)
    places = jnp.where(is_own, places, len(table))
    return jnp.take(table, places, axis=0, mode="fill", fill_value=0)


masks = pytest.mark.parametrize("find", [_chosen, _multiplied, _filled])


@pytest.mark.product("policy")
@masks
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        (BF16, "bf16"),
        (BF16.replace(allreduce="bf16"), "bf16"),
        (PrecisionPolicy.MIXED_F16, "f32"),
        (PrecisionPolicy.MIXED_F16.replace(allreduce="f16"), "f16"),
    ],
    ids=["bf16", "sums in bf16", "f16", "sums in f16"],
)
def test_rows_of_a_split_table_are_put_together_as_they_are_read(mesh, find, policy, dtype):
    """One device has a row and the others nothing: the sum rounds the row and no more."""
    table, words = W[:, :8] / 3, jnp.arange(16) % len(W)

    def fn(table, words, w):
        return jnp.sinh(lax.psum(find(table, words), "d") @ w)

    specs = {"mesh": mesh, "in_specs": (P("d"), P(), P()), "out_specs": P()}
    ours = jax.shard_map(amp(fn, policy), **specs)
    assert sent(ours, table, words, W[:8]) == {("all_reduce", dtype): 1}
    whole = amp(lambda table, words, w: jnp.sinh(table[words] @ w), policy)
    np.testing.assert_array_equal(ours(table, words, W[:8]), whole(table, words, W[:8]))


@orders
@masks
def test_gradients_of_a_split_table_are_those_of_a_whole_one(mesh, order, find):
    """A row is found a hundred times; its cotangents are rounded one by one and add up in f32."""
    table, words = W[:, :8] / 3, jnp.tile(jnp.arange(16), 100)

    def split_loss(table, words, w):
        return jnp.mean(jnp.sinh(lax.psum(find(table, words), "d") @ w))

    def whole_loss(table, words, w):
        return jnp.mean(jnp.sinh(table[words] @ w))

    def wrap(fn):
        return jax.shard_map(fn, mesh=mesh, in_specs=(P("d"), P(), P()), out_specs=P("d"))

    ours = jax.jit(order(wrap, split_loss, BF16))(table, words, W[:8])
    whole = jax.jit(order(lambda fn: fn, whole_loss, BF16))(table, words, W[:8])
    np.testing.assert_allclose(ours, whole, atol=2.0**-8 * np.abs(whole).max())


@pytest.mark.product("order")
@orders
@pytest.mark.parametrize(("policy", "dtype"), [("mixed_bf16", "bf16"), ("mixed_f16", "f32")])
def test_cotangents_of_looked_up_rows_are_added_up_as_they_are_stored(mesh, order, policy, dtype):
    """They go to the table alone: no product reads them, and the gradient is what is scattered."""
    words = jnp.tile(jnp.arange(16), 100)

    def loss(params, words):
        rows = params["table"][words]
        normed = rows * lax.rsqrt(jnp.mean(rows**2, -1, keepdims=True) + 1)
        hidden = jnp.tanh(normed @ params["grow"])
        return jnp.mean(jnp.sinh(lax.psum(hidden @ params["shrink"], "d") @ params["out"]))

    square = jax.random.normal(jax.random.key(0), (3, 64, 64)) / 8
    params = dict(zip(("grow", "shrink", "out"), square, strict=True)) | {"table": W @ W.T}
    split = {"grow": P(None, "d"), "shrink": P("d"), "out": P(), "table": P()}

    def wrap(fn):
        return jax.shard_map(fn, mesh=mesh, in_specs=(split, P()), out_specs=split)

    step = order(wrap, loss, PrecisionPolicy.parse(policy))
    assert sent(step, params, words) == {("all_reduce", dtype): 2}
    exact = jax.jit(wrap(jax.grad(loss)))(params, words)["table"]
    ours = jax.jit(step)(params, words)["table"]
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, exact, atol=0.02 * np.abs(exact).max())


def test_rows_that_are_added_to_a_table_are_gradients(mesh):
    """A sparse update scatters into the table itself: its rows are added up in f32."""

    def step(table, words, x, w):
        return table.at[words].add(lax.psum(x @ w, "d"))

    specs = {"in_specs": (P(), P(), P(None, "d"), P("d")), "out_specs": P()}
    mapped = amp(jax.shard_map(step, mesh=mesh, **specs))
    assert sent(mapped, W, jnp.arange(16), X, W) == {("all_reduce", "f32"): 1}


def test_counts_statistics_and_averaged_parameters_are_added_up_in_f32(mesh):
    """Whatever ``allreduce`` says: a count is no row, and a parameter that is kept is state."""

    def fn(table, words, w):
        count = lax.psum(jnp.full(w.shape[:1], len(words), jnp.float32), "d")
        mean = lax.psum(table.sum(0), "d") / count
        kept = lax.pmean(w, "d")
        return jnp.sinh((table - mean) @ w), kept * 0.5

    policy = BF16.replace(allreduce="bf16")
    specs = {"mesh": mesh, "in_specs": (P("d"), P("d"), P("d")), "out_specs": (P("d"), P())}
    ours = jax.shard_map(amp(fn, policy), **specs)
    table, words = W[:, :8], jnp.arange(16)
    assert set(sent(ours, table, words, jnp.ones((64, 8)))) == {("all_reduce", "f32")}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_gradients_leave_their_products_in_the_precision_of_their_sum(dtype):
    """Under jit XLA adds up over devices what a product gives; the loss stays f32 in any case."""
    policy = BF16.replace(allreduce=dtype)
    plan = plan_of(jax.value_and_grad(lambda w, x: jnp.mean(jnp.square(x @ w))), policy)(W, X)
    (*_, product) = [d for d in plan.decisions() if d.primitive == "dot_general"]
    assert product.output.short == dtype
    sums = [d for d in plan.decisions() if d.primitive == "reduce_sum"]
    assert {d.output.short for d in sums} == {"f32"}


def _scanned(x, layers):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0]


def _written_out(x, layers):
    """Read by norms and sums of the residual stream as well, which compute in f32."""
    for w in layers:
        x = x + jnp.tanh(x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1) @ w)
    return x


def lookup_loss(params, words, apply=_scanned):
    """A loss behind a lookup and layers, as a language model has them."""
    x = apply(params["table"][words], params["layers"])
    return jnp.mean(jnp.square(x @ params["table"].T))


TABLE = np.linspace(-1, 1, 16 * 8, dtype="f").reshape(16, 8)
LOOKUP = {"table": TABLE, "layers": np.full((2, 8, 8), 1 / 8, "f")}
WORDS = np.tile(np.arange(16), (4, 8))  # i32[4, 128]


@orders
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_table_is_rounded_before_it_is_looked_up(order, dtype):
    """XLA may add up what each device finds of it; the gradient adds up in f32 in any case."""
    step = order(lambda fn: fn, lookup_loss, BF16.replace(allreduce=dtype))
    jaxpr = jax.make_jaxpr(step)(LOOKUP, WORDS).jaxpr
    (added,) = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scatter-add"]
    assert added.outvars[0].aval.dtype == jnp.float32
    lowered = jax.jit(step).lower(LOOKUP, WORDS).as_text()
    (found,) = re.findall(r"stablehlo.gather.*-> tensor<4x128x8x(\w+)>", lowered)
    assert found == "bf16"


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_parameter_is_cast_once(dtype):
    """For both passes: the partitioner of XLA:GPU gathers a parameter for each of its casts."""

    def loss(layers, x):
        return jnp.mean(jnp.square(_written_out(x, layers)))

    step = amp(jax.grad(loss), BF16.replace(allreduce=dtype))
    jaxpr = jax.make_jaxpr(step)([jnp.eye(8), jnp.eye(8)], jnp.ones((4, 8)))
    casts = Counter(
        eqn.invars[0]
        for eqn in equations(jaxpr.jaxpr)
        if eqn.primitive.name == "convert_element_type"
        and eqn.invars[0].aval.str_short() == "float32[8,8]"
        and eqn.outvars[0].aval.str_short() == "bfloat16[8,8]"
    )
    assert list(casts.values()) == [1, 1]


@pytest.mark.product
@orders
def test_a_rounded_lookup_gives_what_one_rounded_after_it_gives(order):
    """Bit for bit, loss and gradients, also of several tables and of several rows of words."""
    after = BF16.with_rules(Rule(primitive="gather", precision="f32"))
    early, late = (order(lambda fn: fn, lookup_loss, policy) for policy in (BF16, after))
    tables = jax.tree.map(lambda a: jnp.stack([a, a / 3]), LOOKUP)
    rows = jnp.stack([WORDS, 15 - WORDS])
    for axes, args in {
        (None, None): (LOOKUP, WORDS),
        (0, None): (tables, WORDS),
        (None, 0): (LOOKUP, rows),
        (0, 0): (tables, rows),
    }.items():
        mapped = [f if axes == (None, None) else jax.vmap(f, axes) for f in (early, late)]
        ours, expected = (jax.jit(f)(*args) for f in mapped)
        jax.tree.map(np.testing.assert_array_equal, ours, expected)


@pytest.mark.parametrize(
    "policy",
    [BF16.with_rules(Rule(primitive="gather", precision="bf16")), BF16.replace(allreduce="bf16")],
    ids=["rule", "allreduce"],
)
@orders
def test_rows_are_rounded_if_one_says_so_where_no_type_says_that_a_table_is_split(order, policy):
    """Under Auto axes norms and sums read them, too, and nothing tells that devices add them up."""
    step = order(lambda fn: fn, partial(lookup_loss, apply=_written_out), policy)
    lowered = jax.jit(step).lower(LOOKUP, WORDS).as_text()
    assert re.findall(r"stablehlo.gather.*-> tensor<4x128x8x(\w+)>", lowered) == ["bf16"]


def test_a_reason_does_not_say_that_a_table_is_split_where_it_only_may_be():
    """Under `allreduce` on one device, where no type says anything."""
    policy = BF16.replace(allreduce="bf16")
    plan = plan_of(partial(lookup_loss, apply=_written_out), policy)(LOOKUP, WORDS)
    (lookup,) = [d for d in plan.decisions() if d.primitive == "gather" and "rows" in d.reason]
    assert lookup.reason.startswith("rows of a table that may be split: bf16")


@pytest.mark.parametrize(("devices", "dtype"), [(8, "bf16"), (1, "f32")])
def test_rows_are_rounded_where_a_program_says_how_devices_part_its_arrays(devices, dtype):
    """Auto axes do not say whether the table is split; it may be, if there are several devices."""
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(AxisType.Auto,))
    parted = partial(lax.with_sharding_constraint, shardings=NamedSharding(mesh, P(None, "d")))
    loss = partial(lookup_loss, apply=lambda x, layers: _written_out(parted(x), layers))
    lowered = jax.jit(amp(jax.value_and_grad(loss), BF16)).lower(LOOKUP, WORDS).as_text()
    assert re.findall(r"stablehlo.gather.*-> tensor<4x128x8x(\w+)>", lowered) == [dtype]


def test_points_of_a_split_table_stay_f32():
    """A network that reads differences of points would read those of roundings."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    rows = NamedSharding(mesh, P())

    def fn(points, pairs, w):
        first, second = (points.at[pairs[:, n]].get(out_sharding=rows) for n in range(2))
        return jnp.tanh((first - second) @ w)

    pairs = jnp.stack([jnp.arange(64) % 8, jnp.arange(64) % 7], -1)
    points = jax.device_put(100 + W[:8, :3], NamedSharding(mesh, P("d")))
    with jax.set_mesh(mesh):
        lowered = jax.jit(amp(fn)).lower(points, pairs, W[:3]).as_text()
    assert re.findall(r"stablehlo.gather.*-> tensor<64x3x(\w+)>", lowered) == ["f32", "f32"]


def test_a_lookup_of_few_rows_leaves_the_table_alone():
    """To round a large table for the sake of some words would cost more than it saves."""
    lowered = jax.jit(amp(lookup_loss)).lower(LOOKUP, WORDS[:1, :4]).as_text()
    (found,) = re.findall(r"stablehlo.gather.*-> tensor<1x4x8x(\w+)>", lowered)
    assert found == "f32"


@orders
@pytest.mark.parametrize(
    ("axis_type", "primitive"),
    [(AxisType.Auto, "sharding_constraint"), (AxisType.Explicit, "reshard")],
)
def test_a_parameter_is_moved_low(order, axis_type, primitive):
    """By a sharding constraint, or by reshard where shardings are types."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(axis_type,))
    place = jax.lax.with_sharding_constraint if axis_type is AxisType.Auto else jax.reshard
    w = jax.device_put(W, NamedSharding(mesh, P("d")))
    x = jax.device_put(X, NamedSharding(mesh, P("d")))

    def loss(w, x):
        return jnp.mean(jnp.square(x @ place(w, NamedSharding(mesh, P()))))

    step = jax.jit(order(lambda fn: fn, loss, BF16), out_shardings=w.sharding)
    lowered = step.lower(w, x)
    to_all = r"sdy.sharding_constraint .*\[{}, {}\]> : tensor<64x32x(\w+)>"
    moved = re.findall(to_all, lowered.as_text())
    assert moved[0] == "bf16"
    after = BF16.with_rules(Rule(primitive=primitive, precision="f32"))
    late = jax.jit(order(lambda fn: fn, loss, after), out_shardings=w.sharding)
    np.testing.assert_array_equal(step(w, x), late(w, x))


@orders
def test_a_constraint_alone_places_a_program(mesh, order):
    """A program without sharded arguments runs on the devices that it names."""

    def loss(w, x):
        return jnp.mean(
            jnp.square(lax.with_sharding_constraint(x, NamedSharding(mesh, P("d"))) @ w)
        )

    found = order(lambda fn: fn, loss, BF16)(W, X)
    assert len(found.sharding.device_set) == 8


@orders
@pytest.mark.parametrize("apply", [_scanned, _written_out])
def test_a_lookup_says_where_its_rows_lie(order, apply):
    """It leads from Explicit axes to Auto ones and back, and the table is rounded on the way."""
    mesh = jax.make_mesh((2, 4), ("d", "e"), axis_types=(AxisType.Explicit,) * 2)
    rows = NamedSharding(mesh, P("d", None, None))

    def loss(params, words):
        x = apply(params["table"].at[words].get(out_sharding=rows), params["layers"])
        return jnp.mean(jnp.square(x @ params["head"]))

    params = {**LOOKUP, "head": LOOKUP["table"].T}
    specs = {"table": P("e"), "layers": P(), "head": P()}
    placed = jax.tree.map(lambda p, s: jax.device_put(p, NamedSharding(mesh, s)), params, specs)
    step = jax.jit(order(lambda fn: fn, loss, BF16))
    with jax.set_mesh(mesh):
        ours = step(placed, jax.device_put(WORDS, NamedSharding(mesh, P("d"))))
        lowered = step.lower(placed, WORDS).as_text()
    (found,) = re.findall(r"stablehlo.gather.*-> tensor<4x128x8x(\w+)>", lowered)
    assert found == "bf16"

    def whole(params, words):
        x = apply(params["table"][words], params["layers"])
        return jnp.mean(jnp.square(x @ params["head"]))

    expected = jax.jit(order(lambda fn: fn, whole, BF16))(params, WORDS)
    for name, exact in expected.items():
        np.testing.assert_allclose(ours[name], exact, atol=0.02 * np.abs(exact).max())


def test_a_gather_spread_over_fusions_counts_once():
    """A TPU overlaps one gather with several fusions and names it in each, by one channel."""
    gather = "bf16[64,32]{1,0} all-gather(%p), channel_id=4, dimensions={0}"
    text = f"""HloModule step

%first (p: bf16[16,32]) -> bf16[64,32] {{
  %p = bf16[16,32]{{1,0}} parameter(0)
  ROOT %all-gather.1 = {gather}
}}

%second (p: bf16[16,32]) -> bf16[64,32] {{
  %p = bf16[16,32]{{1,0}} parameter(0)
  ROOT %all-gather.2 = {gather}
}}

ENTRY %main (p: bf16[16,32]) -> (bf16[64,32], bf16[64,32], bf16[64,32]) {{
  %p = bf16[16,32]{{1,0}} parameter(0)
  %a = bf16[64,32]{{1,0}} fusion(%p), kind=kCustom, calls=%first
  %b = bf16[64,32]{{1,0}} fusion(%p), kind=kCustom, calls=%second
  %c = {gather.replace("=4", "=5")}
  ROOT %all = (bf16[64,32]{{1,0}}, bf16[64,32]{{1,0}}, bf16[64,32]{{1,0}}) tuple(%a, %b, %c)
}}
"""
    assert collectives(hlo.parse(text)) == {("all-gather", "bf16"): 2 * 64 * 32 * 2}


@orders
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_gradients_under_jit_are_added_up_in_the_policy_s_precision(order, dtype):
    """XLA adds up over devices what a product gives, be the backward pass the plan's or JAX's."""

    def loss(weights, x):
        return jnp.mean(jnp.square(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]))

    step = order(lambda fn: fn, loss, BF16.replace(allreduce=dtype))
    jaxpr = jax.make_jaxpr(step)(jnp.ones((3, 64, 64)), X).jaxpr
    gradients = [
        eqn.outvars[0].aval
        for eqn in equations(jaxpr)
        if eqn.primitive.name in PRODUCTS and eqn.outvars[0].aval.shape == (64, 64)
    ]
    assert gradients
    assert {aval.dtype for aval in gradients} == {Precision.parse(dtype).dtype}


@orders
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_gradients_of_convolutions_are_added_up_in_the_policy_s_precision(order, dtype):
    """Where a backend has such a convolution: TPUs have, GPUs round before they add up."""

    def loss(kernel, x):
        y = lax.conv_general_dilated(jnp.tanh(x), kernel, (1, 1), "SAME")
        return jnp.mean(jnp.square(lax.conv_general_dilated(y, kernel, (1, 1), "SAME")))

    step = jax.jit(order(lambda fn: fn, loss, BF16.replace(allreduce=dtype)))
    args = jnp.ones((4, 4, 3, 3)), jnp.ones((8, 4, 16, 16))
    for platform, given in {"tpu": dtype, "cuda": "bf16"}.items():
        text = step.trace(*args).lower(lowering_platforms=(platform,)).as_text()
        results = re.findall(r"stablehlo\.convolution.*-> tensor<3x3x4x4x(\w+)>", text)
        results += re.findall(r"stablehlo\.convolution.*-> tensor<4x4x3x3x(\w+)>", text)
        assert set(results) == {given}


def test_cotangents_of_both_dtypes_are_added_up():
    """What arrives is read in bfloat16 and in float32, as by a product and by a sum."""

    def read_twice(x):
        how = Sending(copy_p, (), jnp.bfloat16, jnp.float32, widened=True)
        wide, narrow = send_narrow([x], how)
        return jnp.sum(3 * wide) + jnp.sum(5 * narrow.astype(jnp.float32))

    np.testing.assert_array_equal(jax.grad(read_twice)(jnp.ones(3)), 8)
