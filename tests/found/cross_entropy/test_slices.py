"""Who asks for memory has a large matrix read in slices: no narrow copy of all of it is made."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxamp
from jaxamp.found.cross_entropy import losses
from jaxamp.found.cross_entropy.worth import MATTERS, Sizes
from tests.scopes import equations_of

POLICY = jaxamp.PrecisionPolicy.MIXED_BF16.replace(loss_in_chunks="memory")
T, D, V = 24, 8, 192
ORDERS = ("grad(amp(f))", "amp(grad(f))")


@pytest.fixture(autouse=True)
def on_one_device(monkeypatch):
    """What several may divide is not cut."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def _step(loss, order, policy=POLICY):
    def gradient(fn):
        return jax.value_and_grad(fn, (0, 1), has_aux=True)

    if order == ORDERS[0]:
        return gradient(jaxamp.amp(lambda *args: loss(*args), policy))
    return jaxamp.amp(gradient(loss), policy)


def _plain(x, w, labels):
    logits = x @ w
    right = jnp.argmax(logits, -1) == labels
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), right


def _tied(x, w, labels):
    """Capped and smoothed, with a bias, a z-loss and labels that do not count."""
    logits = 30 * jnp.tanh((jnp.tanh(x) @ w.T + jnp.cos(jnp.arange(V))) / 30)
    smooth = optax.smooth_labels(jax.nn.one_hot(labels, V), 0.1)
    each = optax.softmax_cross_entropy(logits, smooth) + 1e-2 * jax.nn.logsumexp(logits, -1) ** 2
    return jnp.sum(each * (labels > 9)) / 5, jnp.argmax(logits, -1)


def _preferred(x, w, labels):
    """The cotangents of a token depend on a sum over tokens, as in DPO: two passes."""
    logits, labels = x.reshape(2, -1, D) @ w, labels.reshape(2, -1)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return -jax.nn.log_sigmoid(each.sum(1) @ jnp.array([1.0, -1.0])), jnp.argmax(logits, -1)


@pytest.mark.product(every=4)
@pytest.mark.parametrize("base", ["bf16", "f16"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("loss", [_plain, _tied, _preferred])
def test_results_are_those_of_a_whole_matrix(loss, order, base, monkeypatch):
    """Loss, gradients and the first of equal words, of logits with so few bits that none rounds."""
    rng = np.random.default_rng(0)
    x, w = (np.round(4 * rng.standard_normal(shape)) / 4 for shape in ((T, D), (D, V)))
    w[:, V // 2] = w[:, 3]
    w = w.T if loss is _tied else w
    args = x.astype(np.float32), w.astype(np.float32), np.arange(T, dtype=np.int32) * 7 % V
    monkeypatch.setattr(losses, "chunks_for", lambda *given: 2)
    monkeypatch.setattr(losses._Losses, "_is_large", lambda self, aval: True)
    policy = jaxamp.PrecisionPolicy.parse(f"mixed_{base}").replace(loss_in_chunks="memory")
    runs, counts = [], []
    for slices in (1, 4):
        cut = partial(Sizes._replace, slices=slices)
        monkeypatch.setattr(Sizes, "in_slices", lambda self, chunks, cut=cut: cut(self))
        step = _step(loss, order, policy)
        runs.append(jax.jit(step)(*args))
        counts.append(sum(e.primitive.name == "scan" for e, _ in equations_of(step, *args)))
    # A pass after a sum over tokens has the scale of the loss; before it, float16 would underflow.
    has_gradients = order == ORDERS[1] or base == "bf16" or loss is _preferred
    assert (counts[1] > counts[0]) is has_gradients  # a loop for each product; JAX's are of a whole
    ((whole, same), grads), ((sliced, first), others) = runs
    np.testing.assert_array_equal(first, same)
    for got, want in zip((sliced, *others), (whole, *grads), strict=True):
        assert np.linalg.norm(got - want) <= 4 * {"bf16": 2**-8, "f16": 2**-11}[
            base
        ] * np.linalg.norm(want)


@pytest.mark.parametrize("order", ORDERS)
def test_no_narrow_copy_of_the_matrix_is_made(order):
    """That of 128,256 words of 4,096 numbers takes 1.05 GB, seven times a sum of logits."""
    shapes = [((8192, 4096), jnp.float32), ((4096, 128256), jnp.float32), ((8192,), jnp.int32)]
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    copies = []
    for word in ("memory", None):
        step = _step(_plain, order, POLICY.replace(loss_in_chunks=word))
        avals = [v.aval for eqn, _ in equations_of(step, *args) for v in eqn.outvars]
        copies.append([a for a in avals if a.dtype == jnp.bfloat16 and a.size == 4096 * 128256])
    assert [len(found) > 0 for found in copies] == [False, True]


def test_a_matrix_is_cut_where_that_saves_memory():
    """A copy of it has to be larger than the logits of a chunk, which are joined of slices."""
    large = Sizes(tokens=8192, width=4096, words=128256)
    cut = large.in_slices(8)
    assert cut.slices == 8
    assert cut.saved(8) - large.saved(8) > MATTERS
    assert 1.3 < cut.time(8) / large.time(8) < 1.6
    for same in (large._replace(width=512), large._replace(words=128257)):
        assert same.in_slices(8) == same
