"""A loss that is one number is differentiated in every way that the program can be."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxamp
from jaxamp.found.cross_entropy.losses import chunk_losses
from tests.found.cross_entropy.ruled import by_logits, clipped
from tests.scopes import equations_of

POLICY = jaxamp.PrecisionPolicy.MIXED_BF16.replace(loss_in_chunks=True)
STORED = POLICY.replace(loss_in_chunks=False)
T, D, V = 24, 8, 192
OPERANDS = tuple(np.random.default_rng(0).standard_normal((2, max(T, V), V)).astype(np.float32))
X, W = OPERANDS[0][:T, :D], OPERANDS[1][:D, :V]
LABELS = np.arange(T, dtype=np.int32) * 7 % V


def _loss(x, w):
    return optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(x) @ w, LABELS).mean()


def _ruled(x, w):
    return by_logits(jnp.tanh(x) @ w, LABELS).mean()


def _norm_is_clipped(x, w):
    return clipped(jnp.tanh(x) @ w, LABELS).mean()


def _forward_mode(f):
    return jax.jvp(f, (X, W), (np.cos(X), np.sin(W)))


def _only_activations(f):
    return jax.grad(f)(X, W)


def _only_the_matrix(f):
    return jax.grad(f, 1)(X, W)


def _mapped(f):
    return jax.vmap(jax.grad(f, (0, 1)), (0, None))(np.stack([X, 2 * X]), W)


def _of_an_ensemble(f):
    return jax.vmap(jax.grad(f, (0, 1)))(np.stack([X, 2 * X]), np.stack([W, -W]))


def _under_a_checkpoint(f):
    return jax.value_and_grad(lambda x, w: 3 * jax.checkpoint(f)(x, w) ** 2, (0, 1))(X, W)


def _linearized(f):
    value, pushed = jax.linearize(f, X, W)
    return value, pushed(np.cos(X), np.sin(W))


def _of_a_scan(f):
    def step(total, x):
        return total + f(x, W), None

    return jax.grad(lambda xs: jax.lax.scan(step, 0.0, xs)[0])(np.stack([X, 2 * X]))


WAYS = [_forward_mode, _only_activations, _only_the_matrix, _mapped, _of_an_ensemble,
        _under_a_checkpoint, _linearized, _of_a_scan]  # fmt: skip


BACKWARD = [way for way in WAYS if way not in (_forward_mode, _linearized)]


@pytest.mark.product("way")
@pytest.mark.parametrize(
    ("way", "loss"),
    [*((way, _loss) for way in WAYS), *((way, _ruled) for way in BACKWARD),
     *((way, _norm_is_clipped) for way in BACKWARD)],
)  # fmt: skip
def test_derivatives(way, loss):
    """They are those with logits stored, as far as 16 bits tell, also by a rule."""
    (found,) = jaxamp.plan_of(loss, POLICY)(X, W).found
    assert found.forward
    runs = [jax.jit(lambda p=p: way(jaxamp.amp(loss, p)))() for p in (POLICY, STORED)]
    for got, want in zip(*map(jax.tree.leaves, runs), strict=True):
        assert np.linalg.norm(got - want) <= 0.01 * np.linalg.norm(want)


@pytest.mark.filterwarnings("ignore::jaxamp.errors.IdlePolicyWarning")
@pytest.mark.parametrize("order", ["grad(amp(f))", "amp(grad(f))"])
def test_recipes_of_8_bits(order):
    """The loss is in chunks, and its products are in 16 bits, as with logits stored."""
    fp8 = [
        jaxamp.PrecisionPolicy.FP8_CURRENT.replace(loss_in_chunks=word) for word in (True, False)
    ]
    (found,) = jaxamp.plan_of(_loss, fp8[0])(X, W).found
    assert found.kind == "loss"
    runs = []
    for policy in fp8:
        step = jax.grad(jaxamp.amp(_loss, policy), 1)
        if order == "amp(grad(f))":
            step = jaxamp.amp(jax.grad(_loss, 1), policy)
        runs.append(jax.jit(step)(X, W))
    assert np.linalg.norm(runs[0] - runs[1]) <= 0.01 * np.linalg.norm(runs[1])


def test_recipes_of_8_bits_quantize_a_large_head():
    """In chunks as with logits stored: each of the three products of the head, and no other."""

    def loss(x, layer, head, labels):
        logits = jnp.tanh(x @ layer) @ head
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    shapes = [(512, 256), (256, 256), (256, 4096)]
    args = [*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)]
    args.append(jax.ShapeDtypeStruct((512,), jnp.int32))
    for word in (True, False):
        policy = jaxamp.PrecisionPolicy.FP8_CURRENT.replace(loss_in_chunks=word)
        step = jaxamp.amp(jax.value_and_grad(loss, (0, 1, 2)), policy)
        names = [eqn.primitive.name for eqn, _ in equations_of(step, *args)]
        assert names.count("quantized_dot") == 3
        assert ("while" in names or "scan" in names) is word


def test_a_value_alone_takes_one_product():
    """Gradients are computed where somebody asks for them."""
    text = str(jax.make_jaxpr(jaxamp.amp(_loss, POLICY))(X, W))
    assert text.count("dimension_numbers") - text.count("DimensionNumbers") <= 2
    assert "custom_jvp_call" in text


def _slope(f):
    return jax.jvp(jax.grad(f), (X, W), (np.cos(X), np.sin(W)))[1]


def _gradient_of_slope(f):
    return jax.grad(lambda x: jnp.vdot(jax.grad(f)(x, W), np.cos(X)))(X)


@pytest.mark.parametrize("second", [_slope, _gradient_of_slope])
def test_a_second_derivative(second):
    """Forward over reverse and reverse over reverse it is that of the equations."""
    second = jax.jit(second, static_argnums=0)
    got, want = (second(jaxamp.amp(_loss, policy)) for policy in (POLICY, STORED))
    assert np.linalg.norm(got - want) <= 0.05 * np.linalg.norm(want)


def test_no_constant_of_a_chunk_is_moved_before_the_loop():
    """Zeros and numbers of words have the size of the logits of a chunk."""
    equations = equations_of(jax.grad(jaxamp.amp(_loss, POLICY), (0, 1)), X, W)
    (loop,) = (eqn for eqn, _ in equations if eqn.primitive.name in ("scan", "while"))
    assert all(v.aval.shape[-2:] != (T // 4, V) for v in loop.invars)


def _two_means(x, w):
    logits = x @ w
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS)
    return losses.mean() - 1e-2 * jnp.square(jax.nn.logsumexp(logits, -1)).sum() / T


def _weighted(x, w):
    weights = jnp.arange(T) % 3 / 2
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, LABELS)
    return jnp.sum(losses * weights) / (jnp.sum(weights) + 1e-5)


@pytest.mark.parametrize("loss", [_two_means, _weighted])
def test_gradients_of_a_mean_are_its_own(loss):
    """What sums are divided by, and added to, is in the loop: no gradient is multiplied later."""
    last = chunk_losses(jax.make_jaxpr(loss)(X, W), POLICY).jaxpr.eqns[-1]
    assert last.primitive.name == "custom_jvp_call"
    step = jax.grad(jaxamp.amp(loss, POLICY), 1)
    want = jax.grad(jaxamp.amp(loss, STORED), 1)(X, W)
    assert np.linalg.norm(jax.jit(step)(X, W) - want) <= 0.01 * np.linalg.norm(want)


def test_a_metric_along_weights_takes_no_other_loop():
    """Its derivative along weights, which are an argument, is not computed with the loss."""

    def with_accuracy(w, weights):
        logits = X @ w
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS)
        right = jnp.argmax(logits, -1) == LABELS
        return (losses * weights).mean(), (right * weights).mean()

    runs, args = [], (W, np.linspace(0, 1, T, dtype=np.float32))
    for policy in (POLICY, STORED):
        step = jax.grad(jaxamp.amp(with_accuracy, policy), has_aux=True)
        runs.append(jax.jit(step)(*args))
        names = [eqn.primitive.name for eqn, _ in equations_of(step, *args)]
        assert names.count("scan") + names.count("while") == (policy is POLICY)
    for got, want in zip(*runs, strict=True):
        assert np.linalg.norm(got - want) <= 0.01 * np.linalg.norm(want)


def test_the_gradient_of_a_transposed_matrix_is_added_up_as_the_matrix_lies():
    """It would be transposed behind the loop else, in float32."""

    def tied(x, w):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w.T, LABELS).mean()

    step = jax.grad(jaxamp.amp(tied, POLICY), (0, 1))
    equations = [eqn for eqn, _ in equations_of(step, X, W.T)]
    (loop,) = (eqn for eqn in equations if eqn.primitive.name in ("scan", "while"))
    assert (V, D) in [v.aval.shape for v in loop.outvars]
    assert (D, V) not in [v.aval.shape for v in loop.outvars]


def test_a_mean_is_added_up_with_its_gradients():
    """A loop stores no loss of a token: XLA reads logits once for losses and cotangents."""
    step = jaxamp.amp(jax.value_and_grad(_loss, (0, 1)), POLICY)
    (loop,) = (e for e, _ in equations_of(step, X, W) if e.primitive.name in ("scan", "while"))
    assert sorted(v.aval.size for v in loop.outvars) == [1, T * D, D * V]
