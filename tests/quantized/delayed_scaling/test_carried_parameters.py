"""Parameters in 8 bits that a step makes for the step after it."""

import functools
import pickle
import re
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxamp import PrecisionPolicy, amp
from jaxamp.errors import PolicyError, RewriteError, TrainingError
from tests.quantized.lowp.models import mlp, mlp_inputs, mlp_loss, policy, worst

DELAYED = policy("fp8_delayed", history=4, ends=True)
CARRIED = DELAYED.replace(scaling={"carried": True})
RATE = 0.1


def updated(loss, params, *args):
    """A whole step of gradient descent."""
    value, grads = jax.value_and_grad(loss)(params, *args)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value


sgd = functools.partial(updated, mlp_loss)


def scanned(params, x, target):
    """A step of layers in a loop, recomputed in the backward pass."""

    def loss(params):
        y, _ = jax.lax.scan(jax.checkpoint(lambda x, p: (x + mlp(p, x), None)), x, params)
        return jnp.mean((y - target) ** 2)

    return updated(loss, params)


def grouped(params, x, target):
    """A step of groups of layers: a loop in a loop."""

    def group(x, layers):
        return jax.lax.scan(lambda x, p: (x + mlp(p, x), None), x, layers)

    return updated(lambda p: jnp.mean((jax.lax.scan(group, x, p)[0] - target) ** 2), params)


def recomputed(params, x, target):
    """A step of layers that are written out, and recomputed."""

    def loss(params):
        y = x
        for layer in params:
            y = y + jax.checkpoint(mlp)(layer, y)
        return jnp.mean((y - target) ** 2)

    return updated(loss, params)


def accumulated(params, x, target):
    """A step that adds up the gradients of two halves, in a loop."""

    def half(total, data):
        return jax.tree.map(jnp.add, total, jax.grad(mlp_loss)(params, *data)), None

    halves = [a.reshape(2, -1, a.shape[-1]) for a in (x, target)]
    total, _ = jax.lax.scan(half, jax.tree.map(jnp.zeros_like, params), tuple(halves))
    return jax.tree.map(lambda p, g: p - RATE * g, params, total), jnp.float32(0)


def unlike(params):
    """The same layer three times, of different magnitudes."""
    return jax.tree.map(lambda a: jnp.stack([a, 2 * a, 0.7 * a]) / 4, params)


PARAMS, X, TARGET = mlp_inputs(32, 16, 32)
STEPS = {
    "plain": (sgd, PARAMS),
    "scanned": (scanned, unlike(PARAMS)),
    "grouped": (grouped, jax.tree.map(lambda a: jnp.stack([a, a / 2]), unlike(PARAMS))),
    "recomputed": (recomputed, [PARAMS, jax.tree.map(lambda a: 2 * a, PARAMS)]),
    "accumulated": (accumulated, PARAMS),
}
LONG = {"grouped", "recomputed"}
NAMES = [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in STEPS]


def assert_same(want, got):
    """Trees are equal bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, want, got)


def carried(history):
    """Parameters of 8 bits, as floats."""
    wide = []
    for part in history["carried"].values():
        values, scale = (np.asarray(part[key].astype(jnp.float32)) for key in ("values", "scale"))
        wide.append(values * scale.reshape(scale.shape + (1,) * (values.ndim - scale.ndim)))
    return wide


@pytest.mark.product("name", every=3)
@pytest.mark.parametrize("name", NAMES)
def test_steps_that_are_not_measured_are_those_without(name):
    """The scales are those of the history in both, wherever parameters are quantized."""
    fn, params = STEPS[name]
    plain, carrying = amp(fn, DELAYED), amp(fn, CARRIED)
    before, history = (step.init(params, X, TARGET) for step in (plain, carrying))
    assert [a.shape for a in carried(history)] == [p.shape for p in jax.tree.leaves(params)]
    want = got = params
    for _ in range(3):
        (want, loss), _ = plain.unmeasured(before, want, X, TARGET)
        (got, same), history = carrying.unmeasured(history, got, X, TARGET)
        assert_same((want, loss), (got, same))
    assert not np.array_equal(jax.tree.leaves(params)[0], jax.tree.leaves(got)[0])


@pytest.fixture(scope="module")
def small():
    """A step of one product, whose magnitudes are easy to foresee, and its arguments."""

    def double(w, x):
        return 2 * w, x @ w

    step = amp(double, CARRIED)
    args = jnp.eye(16), jnp.ones((16, 16))
    return step, args, step.init(*args)


def test_the_scale_is_that_of_the_history_that_a_step_takes(small):
    """In measured steps a parameter that grows is clipped for one step more."""
    step, (w, x), history = small
    assert float(history["carried"]["0"]["scale"]) == 2.0**-8  # of 1: 1/448 and up
    products = []
    for _ in range(4):
        (w, product), history = step(history, w, x)
        products.append(float(product[0, 0]))
    np.testing.assert_array_equal(history["amax"][:, 1], [8, 4, 2, 1])
    # Of 1, 2, 4 and 8: what may be stored is 448 times 2**-8, twice, and then twice as much.
    np.testing.assert_array_equal(products, [1, 1.75, 1.75, 3.5])
    (_, product), _ = step.unmeasured(history, w, x)
    np.testing.assert_array_equal(product, 7)  # of 16


def test_measured_steps_remember_what_steps_without_do():
    """The first ones are equal; the magnitudes of parameters are those of the parameters taken."""
    plain, carrying = amp(sgd, DELAYED), amp(sgd, CARRIED)
    before, history = (step.init(PARAMS, X, TARGET) for step in (plain, carrying))
    (want, loss), after = plain(before, PARAMS, X, TARGET)
    (got, same), history = carrying(history, PARAMS, X, TARGET)
    assert_same((want, loss), (got, same))
    assert_same(after["amax"], history["amax"])
    for new, narrow in zip(jax.tree.leaves(got), carried(history), strict=True):
        np.testing.assert_allclose(narrow, new.astype(jnp.bfloat16), rtol=2**-4, atol=2**-12)
    (_, loss), _ = plain(after, want, X, TARGET)
    (_, same), _ = carrying(history, got, X, TARGET)
    np.testing.assert_allclose(same, loss, rtol=2**-8)


@pytest.mark.long
def test_steps_in_a_loop_and_donated():
    """A history is a pytree like any other: a carry of a scan, and an argument that is donated."""
    step = amp(sgd, CARRIED)
    history = step.init(PARAMS, X, TARGET)
    want, after = PARAMS, history
    for count in range(4):
        run = step.unmeasured if count % 2 else step
        (want, _), after = run(after, want, X, TARGET)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def trained(history, params):
        def two(carry, _):
            (params, _), history = step(*carry, X, TARGET)
            (params, _), history = step.unmeasured(history, params, X, TARGET)
            return (history, params), None

        return jax.lax.scan(two, (history, params), length=2)[0]

    history, got = trained(*jax.tree.map(jnp.copy, (history, PARAMS)))
    assert worst(want, got) > 60
    assert_same(jax.tree.map(jnp.shape, after), jax.tree.map(jnp.shape, history))


def test_a_checkpoint_goes_on():
    """Put away as arrays of numpy and taken back, the training is the same."""
    step = amp(sgd, CARRIED)
    params, history = PARAMS, step.init(PARAMS, X, TARGET)
    (params, _), history = step(history, params, X, TARGET)
    saved = jax.tree.map(lambda a: np.asarray(a).copy(), (history, params))
    want = step(history, params, X, TARGET)
    assert_same(want, step(*jax.tree.map(jnp.asarray, saved), X, TARGET))
    again = pickle.loads(pickle.dumps(step))
    assert again.policy == step.policy
    assert PrecisionPolicy.from_json(CARRIED.to_json()).scaling.carried


class Net(eqx.Module):
    """A model that holds more than arrays."""

    layer: eqx.nn.Linear
    activation: Any

    def __call__(self, x):
        return self.activation(jax.vmap(self.layer)(x))


@jax.tree_util.register_dataclass
@dataclass
class State:
    """Parameters, an optimizer's state, and a count."""

    params: Any
    opt_state: Any
    count: Any


def train_net(net, x, target):
    """A step of an equinox module."""
    loss, grads = eqx.filter_value_and_grad(lambda net: jnp.mean((net(x) - target) ** 2))(net)
    return eqx.apply_updates(net, jax.tree.map(lambda g: -RATE * g, grads)), loss


ADAM = optax.adam(1e-2)


def train_state(state, x, target):
    """A step of a state, which is all that it returns."""
    grads = jax.grad(mlp_loss)(state.params, x, target)
    updates, opt_state = ADAM.update(grads, state.opt_state)
    return State(optax.apply_updates(state.params, updates), opt_state, state.count + 1)


FIRST = {
    "module": (train_net, Net(eqx.nn.Linear(16, 16, key=jax.random.key(0)), jax.nn.relu), 1),
    "state": (train_state, State(PARAMS, ADAM.init(PARAMS), jnp.int32(0)), 3),
    "alone": (lambda w, x, target: w - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), X.T @ X, 1),
}


@pytest.mark.product("name", every=3)
@pytest.mark.parametrize("name", FIRST)
def test_whatever_holds_the_parameters(name):
    """The first argument is a tree of any kind; what quantized products read of it is carried."""
    fn, first, count = FIRST[name]
    plain, carrying = amp(fn, DELAYED), amp(fn, CARRIED)
    before, history = (step.init(first, X, TARGET) for step in (plain, carrying))
    assert len(history.get("carried", ())) == count
    want, _ = plain.unmeasured(before, first, X, TARGET)
    got, history = carrying.unmeasured(history, first, X, TARGET)
    assert_same(*map(jax.tree.leaves, (eqx.filter((want, got), eqx.is_array))))


def test_an_average_is_quantized_anew():
    """Parameters from elsewhere: the step would go on with the old ones, as documented."""
    plain, carrying = amp(sgd, DELAYED), amp(sgd, CARRIED)
    before, history = (step.init(PARAMS, X, TARGET) for step in (plain, carrying))
    average = jax.tree.map(lambda p: p / 2 + 0.01, PARAMS)
    anew, history_anew = (step.init(average, X, TARGET) for step in (plain, carrying))
    want, _ = plain.unmeasured(anew, average, X, TARGET)
    stale, _ = carrying.unmeasured(history, average, X, TARGET)
    assert stale[1] == plain.unmeasured(before, PARAMS, X, TARGET)[0][1] != want[1]
    assert_same(want, carrying.unmeasured(history_anew, average, X, TARGET)[0])


def test_what_a_step_leaves_alone_is_not_read_again():
    """Frozen weights, beside adapters that are trained: only their 8 bits are read."""

    def loss(adapter, frozen, x):
        return jnp.mean((x @ frozen + (x @ adapter["down"]) @ adapter["up"]) ** 2)

    def fn(params, x):
        value, grads = jax.value_and_grad(loss)(params["adapter"], params["frozen"], x)
        adapter = jax.tree.map(lambda p, g: p - RATE * g, params["adapter"], grads)
        return {"adapter": adapter, "frozen": params["frozen"]}, value

    adapter = {"down": jnp.ones((16, 16)) / 16, "up": jnp.zeros((16, 16))}
    params = {"adapter": adapter, "frozen": PARAMS["up"][:, :16]}
    step = amp(fn, CARRIED)
    history = step.init(params, X)
    spoilt = {**params, "frozen": jnp.full((16, 16), jnp.nan)}
    (_, want), after = step.unmeasured(history, params, X)
    (_, got), same = step.unmeasured(history, spoilt, X)
    assert np.isfinite(want)
    assert_same(want, got)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(*(v.astype(np.float32) for v in (a, b))),
        after,
        same,
    )
    assert len(after["carried"]) == 3


def test_infinities_are_seen_in_the_next_step(small):
    """What became infinite is NaN in the product that reads it, and leaves the scales alone."""
    step, (w, x), _ = small
    huge = w.at[3, 3].set(3e38)  # doubled it is infinite
    for run in (step, step.unmeasured):
        (new, _), after = run(step.init(huge, x), huge, x)
        (_, product), after = run(after, new, x)
        np.testing.assert_array_equal(np.isnan(product).all(axis=0), np.arange(16) == 3)
        assert np.isfinite(after["amax"]).all()


def test_a_step_that_is_skipped_keeps_its_parameters():
    """Where gradients are not finite, the 8 bits are those of what the step has returned."""
    optimizer = optax.apply_if_finite(optax.sgd(RATE), max_consecutive_errors=5)

    @amp(policy=CARRIED)
    def step(params, opt_state, x, target):
        loss, grads = jax.value_and_grad(mlp_loss)(params, x, target)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    args = PARAMS, optimizer.init(PARAMS)
    history = step.init(*args, X, TARGET)
    (*args, loss), after = step(history, *args, X.at[0, 0].set(jnp.nan), TARGET)
    assert np.isnan(loss)
    assert_same(PARAMS, args[0])
    assert_same(carried(history), carried(after))
    (_, _, loss), _ = step(after, *args, X, TARGET)
    assert np.isfinite(loss)


def test_the_bits_lie_where_the_parameters_lie():
    """Each device quantizes and keeps its part."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("d"))
    step = amp(sgd, CARRIED)
    history = step.init(PARAMS, X, TARGET)
    want, _ = step.unmeasured(history, PARAMS, X, TARGET)
    params = jax.device_put(PARAMS, rows)
    history = jax.jit(step.init)(params, X, TARGET)
    got, after = jax.jit(step.unmeasured)(history, params, X, TARGET)
    assert worst(want, got) > 40
    for part, new in zip(after["carried"].values(), jax.tree.leaves(got[0]), strict=True):
        assert part["values"].sharding.is_equivalent_to(new.sharding, 2)
        assert not new.sharding.is_fully_replicated


def test_a_parameter_is_carried_as_it_is_read_first():
    """Read whole and by slices, or transposed: other readings are quantized at hand."""

    def fn(w, x):
        def body(y, layer):
            return y @ layer, None

        y, _ = jax.lax.scan(body, x, w)
        return 0.5 * w, (y, x @ w.reshape(48, 16)[:16].T, x @ w[0])

    w = jnp.stack([jnp.eye(16), 2 * jnp.eye(16), 4 * jnp.eye(16)])
    x = jnp.full((16, 16), 3.0)
    step = amp(fn, CARRIED)
    history = step.init(w, x)
    for _ in range(2):
        (w, products), history = step(history, w, x)
    np.testing.assert_array_equal([p[0, 0] for p in products], [3, 1.5, 1.5])


NOT_RETURNED = {
    "a dict of 1 (['w']) first and returns an array first": lambda p, x: (x @ p["w"], p),
    "p['w'] is float32[16,16], and bfloat16[16,16] is returned": lambda p, x: (
        {"w": p["w"].astype(jnp.bfloat16)},
        x @ p["w"],
    ),
    "p['w'] is float32[16,16], and float32[8,16] is returned": lambda p, x: {"w": (x @ p["w"])[:8]},
    "and 1 is returned": lambda p, x: ({"w": 1}, x @ p["w"]),
    "a dict of 2 (['v'], ['w'])": lambda p, x: {"w": x @ p["w"], "v": x},
}


@pytest.mark.parametrize("says", NOT_RETURNED)
def test_parameters_come_first(says):
    """A step that returns something else has no place for their 8 bits, and says what it has."""
    step = amp(NOT_RETURNED[says], CARRIED)
    with pytest.raises(TrainingError, match=re.escape(says)):
        step.init({"w": X[:16]}, X[:16])


def flax_model():
    """A layer of flax nnx, and a step of its arrays."""
    graph, state = nnx.split(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))

    def loss(arrays, x, target):
        copied = jax.tree.map(lambda a: a, state)
        nnx.replace_by_pure_dict(copied, arrays)
        return jnp.mean((nnx.merge(graph, copied)(x) - target) ** 2)

    return nnx.merge(graph, state), nnx.to_pure_dict(state), functools.partial(updated, loss)


def test_arrays_of_flax_are_given_in_a_dict():
    """What is changed in place is returned by nothing, and the error says what to give."""
    model, arrays, fn = flax_model()
    step = amp(fn, CARRIED)
    history = step.init(arrays, X, TARGET)
    (_, loss), history = step(history, arrays, X, TARGET)
    assert len(history["carried"]) == 1
    assert np.isfinite(loss)
    with pytest.raises(TrainingError, match="to_pure_dict"):
        amp(lambda model, x: model(x), CARRIED).init(model, X)


def test_words_of_errors(small):
    """Parameters passed by name, gradients around a step, a policy without a history."""
    step, (w, x), history = small
    with pytest.raises(TrainingError, match="passed by name"):
        step.init(w=w, x=x)
    with pytest.raises(RewriteError, match="inside"):
        jax.grad(lambda w: jnp.sum(step(history, w, x)[0][0]))(w)
    with pytest.raises(PolicyError, match="history=1024"):
        PrecisionPolicy.FP8_CURRENT.replace(scaling={"carried": True})
    with pytest.raises(TrainingError, match="history first"):
        step.unmeasured(w, x)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda part: {},
        lambda part: {"0": {}},
        lambda part: {"0": {**part, "values": part["values"][:8]}},
        lambda part: {"0": {**part, "values": part["values"].astype(jnp.float8_e5m2)}},
        lambda part: {"0": {**part, "scale": part["scale"].astype(jnp.bfloat16)}},
        lambda part: {"0": {**part, "scale": jnp.ones(16)}},
        lambda part: {"0": part, "1": part},
        lambda part: {"1": part},
    ],
)
def test_what_is_carried_is_of_this_step(small, spoil):
    """Parameters of another shape, format or step are refused before any work."""
    step, args, history = small
    with pytest.raises(TrainingError, match="not this step's"):
        step({**history, "carried": spoil(history["carried"]["0"])}, *args)


def test_histories_of_both_kinds_of_steps_are_told_apart(small):
    """One without parameters is of no step that carries them, and the other way round."""
    step, args, history = small
    plain = amp(step.__wrapped__, DELAYED)
    for run, other in ((plain, history), (step, plain.init(*args))):
        with pytest.raises(TrainingError, match="not this step's"):
            run(other, *args)
