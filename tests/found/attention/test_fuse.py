"""A program with its attentions as single equations computes what it did, and is differentiated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import jaxamp
from jaxamp.found.attention.fuse import fuse_attention
from jaxamp.policy.policy import PrecisionPolicy
from tests.found.attention.finding import FUSED, masks
from tests.scopes import equations_of

POLICY = PrecisionPolicy.AUTO_MIXED_BF16.replace(fused_attention=True)
B, T, N, H = 2, 16, 4, 8


def _softmax(q, k, v):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def _causal(q, k, v):
    scores = jnp.einsum("btnh,bsnh->bnts", q * H**-0.5, k)
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def _operands():
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (B, T, N, H)) for key in keys]


def _gradient(attend):
    def loss(q, k, v):
        return jnp.sum(attend(q, k, v) * jnp.cos(q))

    return jax.value_and_grad(loss, (0, 1, 2))


def test_the_exponential_of_a_number_scales_scores():
    """As a learned temperature that is known: the number is written in the program itself."""

    def attend(q, k, v):
        return _softmax(q * jax.lax.exp(np.float32(0.5)), k, v)

    fused = fuse_attention(jax.make_jaxpr(attend)(*_operands()), POLICY)
    assert [e.primitive.name for e in fused.jaxpr.eqns].count("attention_forward") == 1


def test_an_integer_has_a_tangent_that_is_no_number():
    """A rule of derivatives that is mapped over integers is given tangents without a value."""

    @jax.custom_jvp
    def scaled(x, head):
        return x / (1 + head)

    @scaled.defjvp
    def _(primals, tangents):
        x, head = primals
        return scaled(x, head), tangents[0] / (1 + head)

    def attend(q, k, v):
        return _softmax(jax.vmap(scaled, (2, 0), 2)(q, jnp.arange(N)), k, v)

    closed = jax.make_jaxpr(_gradient(attend))(*_operands())
    assert any(v.aval.dtype == jax.dtypes.float0 for e in closed.eqns for v in e.outvars)
    (found,) = fuse_attention(closed, POLICY).found
    assert (found.forward, found.backward) == (True, True)


@pytest.mark.parametrize(("attend", "mask"), [(_softmax, "none"), (_causal, "causal")])
def test_forward_and_backward_are_replaced_together(attend, mask):
    """The program with its gradient has one equation for each, and the same results in float32."""
    operands = _operands()
    closed = jax.make_jaxpr(_gradient(attend))(*operands)
    fused = fuse_attention(closed, POLICY)
    names = [eqn.primitive.name for eqn in fused.jaxpr.eqns]
    assert [n for n in names if n.startswith("attention")] == [
        "attention_forward",
        "attention_backward",
    ]
    assert "exp" not in names
    assert [(a.forward, a.backward) for a in fused.found] == [(True, True)]
    assert masks(fused.jaxpr) == [mask]
    pairs = zip(jaxpr_as_fun(fused.jaxpr)(*operands), jaxpr_as_fun(closed)(*operands), strict=True)
    for found, expected in pairs:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1024])
def test_a_mask_that_every_head_has_is_known_at_any_length(window):
    """JAX makes it for each head, 2^29 booleans here."""

    def attend(q, k, v):
        size = window and (window - 1, 0)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=size)

    x = jax.ShapeDtypeStruct((1, 4096, 32, 64), jnp.float32)
    plan = jaxamp.plan_of(attend, FUSED)(x, x, x)
    assert masks(plan.jaxpr) == ["window" if window else "causal"]


def test_a_known_mask_with_gaps_is_no_causal_one():
    """Though each query sees the first key and itself, and none after: one misses a key between."""

    def attend(q, k, v):
        rows, keys = np.arange(64)[:, None], np.arange(64)
        seen = (keys <= rows) & ((keys != 1) | (rows != 5))
        return jax.nn.dot_product_attention(q, k, v, mask=seen[None, None])

    x = jax.ShapeDtypeStruct((1, 64, 4, 64), jnp.float32)
    plan = jaxamp.plan_of(attend, FUSED)(x, x, x)
    assert masks(plan.jaxpr) == ["bias"]


def test_a_program_without_attention_stays_the_same_object():
    """Nothing is emitted anew."""
    closed = jax.make_jaxpr(lambda x, w: jax.nn.softmax(x @ w))(jnp.ones((4, 8)), jnp.ones((8, 8)))
    assert fuse_attention(closed, POLICY).jaxpr is closed


@pytest.mark.parametrize(("learnt", "count"), [(False, 1), (True, 0)])
def test_slopes_that_are_not_learnt_are_no_obstacle(learnt, count):
    """A program with its gradient that does not ask for theirs is replaced, others say why not."""
    past = np.abs(np.arange(T)[:, None] - np.arange(T))

    def loss(q, k, v, slopes):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) - slopes[:, None, None] * past
        return jnp.sum(jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v) * jnp.cos(q))

    step = jax.grad(loss, (0, 1, 2, 3) if learnt else (0, 1, 2))
    plan = jaxamp.plan_of(step, POLICY)(*_operands(), np.ones(N, np.float32))
    assert len(plan.found) == count
    assert ["share numbers of a bias" in a.obstacle for a in plan.refused] == [True] * learnt


@pytest.mark.parametrize("policy", ["auto_mixed", "auto_mixed_bf16"])
def test_a_kernel_reads_16_bits_beside_a_bias(policy):
    """Whatever numbers the rows that see nothing are told by."""
    policy = PrecisionPolicy.parse(policy).replace(fused_attention=True)

    def attend(q, k, v, bias):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) + bias
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)

    q, k, v = _operands()
    equations = equations_of(jaxamp.amp(attend, policy), q, k, v, jnp.ones((B, N, T, T)))
    (kernel,) = [eqn for eqn, _ in equations if eqn.primitive.name == "attention_forward"]
    assert [x.aval.dtype.itemsize for x in kernel.invars[:3]] == [2, 2, 2]


def test_the_policy_switches_it_off():
    """By its field, by a rule, and by a region that keeps float32."""
    operands = _operands()
    rule = jaxamp.Rule(primitive="attention_forward", precision="f32")

    def kept(q, k, v):
        with jaxamp.keep_precision("f32"):
            return _softmax(q, k, v)

    assert not jaxamp.plan_of(_softmax, POLICY.replace(fused_attention=False))(*operands).found
    for attend, policy in ((_softmax, POLICY.with_rules(rule)), (kept, POLICY)):
        plan = jaxamp.plan_of(attend, policy)(*operands)
        assert not plan.found
        assert len(plan.refused) == 1


def test_derivatives_that_are_stopped_stay_stopped():
    """Weights without a derivative are not those of an attention that has one."""

    def stopped(q, k, v):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k)
        weights = jax.lax.stop_gradient(jax.nn.softmax(scores))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    closed = jax.make_jaxpr(stopped)(*_operands())
    assert fuse_attention(closed, POLICY).jaxpr is closed


@pytest.mark.parametrize("attend", [_softmax, _causal])
def test_gradients_are_those_of_the_program(attend):
    """`grad(amp(f))` and `amp(grad(f))` agree with float32 as well as without it."""
    operands = _operands()
    exact = jax.jit(_gradient(attend))(*operands)[1]

    def loss(q, k, v):
        return jnp.sum(attend(q, k, v) * jnp.cos(q))

    ways = (
        jax.grad(jaxamp.amp(loss, POLICY), (0, 1, 2)),
        lambda *xs: jaxamp.amp(_gradient(attend), POLICY)(*xs)[1],
    )
    for way in ways:
        for found, expected in zip(jax.jit(way)(*operands), exact, strict=True):
            error = jnp.max(jnp.abs(found - expected)) / jnp.max(jnp.abs(expected))
            assert error < 0.03


def _scanned(q, k, v):
    """Two turns of a loop; the keys of each are its own."""

    def turn(x, operands):
        return _causal(x, *operands), x.sum()

    return jax.lax.scan(turn, q, tuple(jnp.stack([x, 2 * x]) for x in (k, v)))[0]


def test_a_pair_of_loops_is_replaced_together():
    """The first leaves outputs to the second, and no weights; results are the same."""
    operands = _operands()
    closed = jax.make_jaxpr(_gradient(_scanned))(*operands)
    fused = fuse_attention(closed, POLICY)
    assert [(a.forward, a.backward) for a in fused.found] == [(True, True)]
    loops = [eqn for eqn in fused.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert len(loops) == 2
    assert not any(v.aval.shape == (2, B, N, T, T) for loop in loops for v in loop.outvars)
    assert "exp" not in str(fused.jaxpr)
    pairs = zip(jaxpr_as_fun(fused.jaxpr)(*operands), jaxpr_as_fun(closed)(*operands), strict=True)
    for found, expected in pairs:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_weights_that_a_loop_returns_stay():
    """Stacked weights are read by the loop backward, and by whoever calls."""

    def attend(q, k, v):
        def turn(x, operands):
            key, value = operands
            weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", x, key))
            return jnp.einsum("bnts,bsnh->btnh", weights, value), weights

        return jax.lax.scan(turn, q, tuple(jnp.stack([x, 2 * x]) for x in (k, v)))

    def loss(q, k, v):
        out, weights = attend(q, k, v)
        return jnp.sum(out * jnp.cos(q)), weights

    closed = jax.make_jaxpr(jax.grad(loss, (0, 1, 2), has_aux=True))(*_operands())
    assert fuse_attention(closed, POLICY).jaxpr is closed


def test_a_loop_that_computes_again_is_replaced_in_both():
    """With a checkpoint the second loop has a forward pass of its own, and so has the first."""

    def attend(q, k, v):
        turn = jax.checkpoint(lambda x, operands: (_causal(x, *operands), None))
        return jax.lax.scan(turn, q, tuple(jnp.stack([x, 2 * x]) for x in (k, v)))[0]

    fused = fuse_attention(jax.make_jaxpr(_gradient(attend))(*_operands()), POLICY)
    assert [(a.forward, a.backward) for a in fused.found] == [(True, False), (False, True)]
    assert "exp" not in str(fused.jaxpr)


def _layers(q, k, v):
    """Two layers in a loop, whose mask varies over the devices as its operands do."""

    def layer(q, _):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True), None

    return jax.lax.scan(layer, q, None, length=2)[0]


def _mapped(fn):
    mesh = jax.make_mesh((B,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)


@pytest.mark.parametrize(
    "place",
    [
        lambda fn: _gradient(_mapped(jaxamp.amp(fn, POLICY))),
        lambda fn: _gradient(jaxamp.amp(_mapped(fn), POLICY)),
    ],
    ids=["inside", "outside"],
)
def test_loops_on_several_devices_have_the_types_of_shard_map(place):
    """Values vary over manual axes, in the body of a loop as around it."""
    operands = _operands()
    amped = place(_layers)
    assert "attention" in str(jax.make_jaxpr(amped)(*operands))
    found, expected = jax.jit(amped)(*operands), _gradient(_layers)(*operands)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.05, atol=0.05)
