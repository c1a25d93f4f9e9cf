"""Unmodified functions of other libraries go through amp and agree with float32."""

from __future__ import annotations

from typing import Any

import diffrax
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import nnx
from jax import Array
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.util import log_density

from jaxamp import amp
from jaxamp.errors import ArgumentError, OutputError
from tests import audit

BF16_EPS = float(jnp.finfo(jnp.bfloat16).eps)
LOW_PRESETS = ("auto_mixed_bf16", "auto_mixed", "auto_mixed_conservative")


def _agrees(got: Any, want: Any, ulps: float = 8.0) -> None:
    """Same structure and dtypes; each leaf within bfloat16 ulps of its largest float32 value.

    A leaf that is zero but for cancellation (a bias before a norm) is held to a hundredth of the
    largest leaf: that is the size of the terms that cancel.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    largest = max(float(jnp.abs(y).max()) for y in jax.tree.leaves(want))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        size = max(float(jnp.abs(y).max()), 0.01 * largest)
        np.testing.assert_allclose(x, y, rtol=0, atol=ulps * BF16_EPS * size)


def _low_products(fn: Any, *args: Any) -> int:
    """How many products of the function run low; every product must."""
    found = audit.products(jax.make_jaxpr(fn)(*args).jaxpr)
    assert all(p.is_low for p in found), found
    return len(found)


class LinenNet(nn.Module):
    """Convolution, norms, dropout, attention and dense layers of flax linen."""

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        """Logits, (batch, 3)."""
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(4, (3, 3))(x)))
        x = nn.LayerNorm()(nn.avg_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], 4, -1))
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(x, x)
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(3)(x.mean(1))


@pytest.mark.product
@pytest.mark.parametrize("preset", LOW_PRESETS)
def test_linen(preset: str) -> None:
    """A linen model's apply: logits, new statistics, gradients."""
    model, x = LinenNet(), np.random.default_rng(0).normal(size=(2, 4, 4, 2)).astype(np.float32)
    variables = model.init(jax.random.key(0), x, False)

    def loss(apply: Any, variables: Any) -> Any:
        rngs = {"dropout": jax.random.key(1)}
        logits, state = apply(variables, x, True, mutable=["batch_stats"], rngs=rngs)
        return (logits * jnp.arange(3)).sum(), (logits, state)

    plain = jax.jit(jax.value_and_grad(lambda v: loss(model.apply, v), has_aux=True))
    amped = jax.jit(jax.value_and_grad(lambda v: loss(amp(model.apply, preset), v), has_aux=True))
    _agrees(amped(variables), plain(variables), ulps=16)
    assert _low_products(lambda v: loss(amp(model.apply, preset), v)[0], variables) >= 8


class NnxNet(nnx.Module):
    """Two layers, a norm and a dropout of flax nnx."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Logits, (batch, 3)."""
        return self.last(nnx.gelu(self.norm(self.first(x))))


def test_nnx() -> None:
    """An nnx model's gradient under nnx.jit; running statistics are updated in place."""
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)

    def run(wrap: Any) -> Any:
        model = NnxNet(nnx.Rngs(0))

        @nnx.jit
        def step(model: NnxNet) -> Any:
            return nnx.value_and_grad(lambda m: (wrap(m)(x) * jnp.arange(3)).sum())(model)

        loss, grads = step(model)
        return loss, nnx.to_pure_dict(grads), np.asarray(model.norm.mean[...])

    got, want = run(amp), run(lambda m: m)
    _agrees(got, want, ulps=16)
    assert not np.array_equal(got[0], want[0])  # it did run low


class EqxNet(eqx.Module):
    """Embedding, attention, norm and MLP of equinox; a static field beside them."""

    embed: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    width: int = eqx.field(static=True)

    def __init__(self, key: Array) -> None:
        a, b, c = jax.random.split(key, 3)
        self.width = 8
        self.embed = eqx.nn.Embedding(10, self.width, key=a)
        self.attention = eqx.nn.MultiheadAttention(2, self.width, key=b)
        self.norm = eqx.nn.LayerNorm(self.width)
        self.mlp = eqx.nn.MLP(self.width, 3, 12, 1, key=c)

    def __call__(self, tokens: Array) -> Array:
        """Logits, (tokens, 3)."""
        x = jax.vmap(self.embed)(tokens)
        x = x + self.attention(x, x, x)
        return jax.vmap(self.mlp)(jax.vmap(self.norm)(x))


@pytest.mark.product
@pytest.mark.parametrize("preset", LOW_PRESETS)
def test_equinox(preset: str) -> None:
    """An equinox model under filter_jit and filter_grad: amp of the loss, amp of the model."""
    model, tokens = EqxNet(jax.random.key(0)), jnp.array([1, 2, 3, 1, 7])

    def loss(model: EqxNet, tokens: Array) -> Array:
        return (model(tokens) * jnp.arange(3)).sum()

    want = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, tokens)
    got = eqx.filter_jit(eqx.filter_value_and_grad(amp(loss, preset)))(model, tokens)
    _agrees(got[0], want[0], ulps=16)
    _agrees(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), ulps=16)
    amped = amp(model, preset)
    assert amped.width == 8
    _agrees(eqx.filter_jit(amped)(tokens), eqx.filter_jit(model)(tokens), ulps=16)
    params, static = eqx.partition(model, eqx.is_array)
    assert _low_products(lambda p: amp(eqx.combine(p, static), preset)(tokens), params) >= 6


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3),
    "lamb": lambda: optax.lamb(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3),
    "sgd nesterov": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "rmsprop clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.rmsprop(1e-3)),
    "lion accumulated": lambda: optax.MultiSteps(optax.lion(1e-4), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optax_update_is_exact(name: str) -> None:
    """amp of update and apply_updates gives the float32 parameters and moments."""
    optimizer, rng = OPTIMIZERS[name](), np.random.default_rng(0)
    params = {"w": rng.normal(size=(4, 6)).astype(np.float32), "b": np.zeros(6, np.float32)}
    grads = jax.tree.map(lambda p: 1e-3 * rng.normal(size=p.shape).astype(np.float32), params)

    def step(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    want, got = jax.jit(step)(params, state), jax.jit(amp(step))(params, state)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=0)


def test_optax_training_reaches_the_same_loss() -> None:
    """Fifty steps of a decorated train step end where float32 ends."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(32, 8)).astype(np.float32), rng.normal(size=(8, 3))
    y = (x @ w).argmax(1)
    params = {
        "w": rng.normal(size=(8, 16)).astype(np.float32) / 3,
        "v": rng.normal(size=(16, 3)).astype(np.float32) / 4,
    }
    optimizer = optax.adam(1e-2)

    def loss(params: Any) -> Array:
        logits = jax.nn.relu(x @ params["w"]) @ params["v"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def step(params: Any, state: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def train(step: Any) -> list[float]:
        p, s, losses = params, optimizer.init(params), []
        for _ in range(50):
            p, s, value = step(p, s)
            losses.append(float(value))
        return losses

    want, got = train(jax.jit(step)), train(jax.jit(amp(step)))
    assert want[-1] < 0.5 * want[0]
    np.testing.assert_allclose(got, want, rtol=0.03)
    assert got != want  # it did run low


@pytest.mark.long
def test_diffrax_network_field() -> None:
    """A neural ODE solved adaptively inside amp: values and gradients within its tolerance."""
    mlp = eqx.nn.MLP(2, 2, 8, 1, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(mlp, eqx.is_array)

    def solve(params: Any, y0: Array) -> Array:
        field = eqx.combine(params, static)
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, _: field(y)),
            diffrax.Tsit5(),
            0.0,
            1.0,
            0.1,
            y0,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-4),
            max_steps=64,
        )
        assert solution.ys is not None
        return solution.ys[-1]

    y0 = jnp.array([1.0, -0.5])
    _agrees(jax.jit(amp(solve))(params, y0), jax.jit(solve)(params, y0))
    grad = jax.grad(lambda p, y: solve(p, y).sum())
    amped = jax.grad(lambda p, y: amp(solve)(p, y).sum())
    _agrees(jax.jit(amped)(params, y0), jax.jit(grad)(params, y0), ulps=24)


def test_diffrax_without_products_meets_its_tolerance() -> None:
    """A field with nothing to gain keeps the integrator's accuracy: the clock stays float32."""

    def solve(y0: Array) -> Array:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, _: -2.0 * t * y),
            diffrax.Dopri5(),
            0.0,
            2.0,
            0.05,
            y0,
            stepsize_controller=diffrax.PIDController(rtol=1e-6, atol=1e-8),
            max_steps=512,
        )
        assert solution.ys is not None
        return solution.ys[-1]

    y0 = jnp.array([1.0, 3.0])
    np.testing.assert_allclose(jax.jit(amp(solve))(y0), y0 * np.exp(-4.0), rtol=2e-4)


def _regression(x: Array, y: Array | None = None) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(x @ w, sigma), obs=y)


def _data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(60, 3)).astype(np.float32), np.array([0.5, -1.0, 2.0], np.float32)
    return x, (x @ w + 0.3 * rng.normal(size=60)).astype(np.float32), w


def test_numpyro_log_density() -> None:
    """A model's log density and its gradient."""
    x, y, w = _data()

    def density(w: Array) -> Array:
        sites = {"w": w, "sigma": jnp.float32(0.5)}
        return jnp.asarray(log_density(_regression, (x, y), {}, sites)[0])

    at = jnp.asarray(w) + 0.1
    _agrees(jax.jit(amp(density))(at), jax.jit(density)(at), ulps=4)
    _agrees(jax.jit(jax.grad(amp(density)))(at), jax.jit(jax.grad(density))(at), ulps=16)


@pytest.mark.long
def test_numpyro_sampler_of_an_amped_model() -> None:
    """NUTS on a potential that runs low finds the posterior that float32 finds."""
    x, y, _ = _data()

    def potential(z: dict[str, Array]) -> Any:
        sites = {"w": z["w"], "sigma": jnp.exp(z["log_sigma"])}
        return -log_density(_regression, (x, y), {}, sites)[0] - z["log_sigma"]

    start = {"w": jnp.zeros(3), "log_sigma": jnp.zeros(())}

    def posterior(fn: Any) -> np.ndarray:
        mcmc = MCMC(NUTS(potential_fn=fn), num_warmup=150, num_samples=150, progress_bar=False)
        mcmc.run(jax.random.key(0), init_params=start)
        return np.asarray(mcmc.get_samples()["w"]).mean(0)

    # The posterior's deviation is about 0.04; a mean of 150 draws moves by a third of it.
    np.testing.assert_allclose(posterior(amp(potential)), posterior(potential), atol=0.05)


def _guide(x: Array, y: Array | None = None) -> None:
    w = numpyro.param("w_loc", jnp.zeros(3))
    sigma = numpyro.param("sigma_loc", jnp.ones(()), constraint=dist.constraints.positive)
    numpyro.sample("w", dist.Normal(w, 0.1).to_event(1))
    numpyro.sample("sigma", dist.LogNormal(jnp.log(sigma), 0.1))


def _inference() -> SVI:
    return SVI(_regression, _guide, numpyro.optim.Adam(0.05), Trace_ELBO())


@pytest.mark.long
def test_numpyro_svi_update() -> None:
    """A step of variational inference is the place for `amp`: its losses are those of float32."""
    x, y, _ = _data()

    def losses(update: Any, svi: SVI) -> list[float]:
        state, found = svi.init(jax.random.key(0), x, y), []
        for _ in range(8):
            state, loss = update(state, x, y)
            found.append(float(loss))
        return found

    svi, plain = _inference(), _inference()
    np.testing.assert_allclose(losses(amp(svi.update), svi), losses(plain.update, plain), rtol=0.02)


@pytest.mark.parametrize("state", [numpyro.sample, numpyro.param, numpyro.deterministic])
def test_statements_of_a_numpyro_model_are_refused_where_its_handlers_are_outside(
    state: Any,
) -> None:
    """They would be lost from the second call on; a call without handlers came before here."""
    x, y, _ = _data()

    def model(x: Any) -> None:
        if state is numpyro.sample:
            state("w", dist.Normal(jnp.zeros(3), 1), rng_key=jax.random.key(0))
        else:
            state("w", jnp.ones(3))

    amped = amp(model)
    amped(x)
    for _ in range(2):
        with pytest.raises(OutputError, match=r"model .* states numpyro's \w+ 'w'.*svi.update"):
            numpyro.handlers.trace(amped).get_trace(x)
    svi = SVI(_regression, amp(_guide), numpyro.optim.Adam(0.05), Trace_ELBO())
    with pytest.raises(OutputError, match="_guide runs under amp"):
        svi.update(svi.init(jax.random.key(0), x, y), x, y)


def test_a_network_inside_of_a_numpyro_model_runs_under_its_handlers() -> None:
    x, _, _ = _data()
    layer = amp(lambda x, w: jnp.tanh(x @ w))

    def model(x: Any) -> None:
        w = numpyro.sample("w", dist.Normal(jnp.zeros(3), 1))
        numpyro.deterministic("y", layer(x, w))

    seen = [numpyro.handlers.seed(model, 0) for _ in range(2)]
    traces = [numpyro.handlers.trace(seeded).get_trace(x) for seeded in seen]
    assert [list(trace) for trace in traces] == [["w", "y"]] * 2
    assert _low_products(layer, x, jnp.ones(3)) == 1


@pytest.fixture
def keras(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Keras on JAX."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    return pytest.importorskip(
        "keras", reason="keras is not installed, and jaxamp needs it nowhere"
    )


def _keras_model(keras: Any) -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(32, "gelu"), layers.BatchNormalization(), layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    return model


def test_keras_stateless_call(keras: Any) -> None:
    """`fit` and `predict` of a model whose `stateless_call` is amped, beside the plain ones."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 8)).astype("float32")
    y = (x @ rng.normal(size=(8, 1))).astype("float32")
    plain, model = _keras_model(keras), _keras_model(keras)
    model.stateless_call = amp(model.stateless_call)
    want, got = (
        m.fit(x, y, epochs=3, shuffle=False, verbose=0).history["loss"] for m in (plain, model)
    )
    np.testing.assert_allclose(got, want, rtol=0.02)
    np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), atol=0.1)
    variables = [
        [v.value for v in held]
        for held in (model.trainable_variables, model.non_trainable_variables)
    ]
    assert _low_products(model.stateless_call, *variables, x) == 2


def test_a_keras_layer_says_what_to_wrap(keras: Any) -> None:
    """Statistics that its call leaves in the layer, and arrays that it holds, are named."""

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.norm = keras.layers.Dense(1), keras.layers.BatchNormalization()

        @amp
        def call(self, x: Any, training: bool = False) -> Any:
            return self.norm(self.dense(x), training=training)

    x, net = np.ones((32, 8), "float32"), Net()
    net.compile("sgd", "mse")
    with pytest.raises(
        jax.errors.UnexpectedTracerError, match=r"(?s)traced for amp\..*stateless_call"
    ):
        net.fit(x, x[:, :1], verbose=0)
    net = Net()
    net.dense.build((32, 8))
    with pytest.raises(ArgumentError, match=r"argument self of call.*stateless_call"):
        net(x)
