"""Random losses in chunks against the same programs as they are."""

from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxpr_as_fun

from jaxamp.found.cross_entropy import losses
from tests import tolerances
from tests.found.cross_entropy.finding import _QUICK, CHUNKED
from tests.selection import drawn

D, V = 4, 40
IGNORED = -100


class Spelling(NamedTuple):
    """A loss, as somebody may write it."""

    shape: tuple[int, ...]
    chunks: int
    way: str
    reduction: str
    labels: str
    is_tied: bool
    has_bias: bool
    has_weights: bool
    temperature: float | None
    cap: float | None
    z_loss: float
    smoothing: float
    is_scaled: bool

    def per_token(self, x, w, bias, weights, labels):
        s = jnp.einsum("...d,vd->...v", x, w) if self.is_tied else x @ w
        s = s + bias if self.has_bias else s
        s = s if self.temperature is None else s / self.temperature
        s = s if self.cap is None else self.cap * jnp.tanh(s / self.cap)
        known = jnp.where(labels == IGNORED, 0, labels) if self.labels == "ignored" else labels
        losses = {"optax": _optax, "log_softmax": _looked_up, "logsumexp": _less}[self.way](
            s, known
        )
        if self.smoothing:
            smooth = -jax.nn.log_softmax(s).mean(-1)
            losses = (1 - self.smoothing) * losses + self.smoothing * smooth
        losses = losses + self.z_loss * jax.nn.logsumexp(s, -1) ** 2
        losses = losses * weights if self.has_weights else losses
        return jnp.where(labels == IGNORED, 0, losses) if self.labels == "ignored" else losses

    def __call__(self, x, w, bias, weights, labels):
        losses = self.per_token(x, w, bias, weights, labels)
        counted = labels != IGNORED
        found = {
            "mean": losses.mean,
            "sum": losses.sum,
            "counted": lambda: losses.sum() / jnp.maximum(counted.sum(), 1),
            "weighted": lambda: losses.sum() / (weights.sum() + 1e-5),
            "squared": lambda: (losses**2).mean(),
        }[self.reduction]()
        return 3 * found if self.is_scaled else found

    def operands(self):
        rng = np.random.default_rng(0)
        x, w = rng.standard_normal((*self.shape, D)), rng.standard_normal((D, V))
        labels = rng.integers(0, V, self.shape)
        if self.labels != "words":
            others = [IGNORED] if self.labels == "ignored" else [V, V + 9, -1, -V - 1]
            labels = np.where(rng.random(self.shape) < 0.3, rng.choice(others, self.shape), labels)
        weights = rng.random(self.shape) * (rng.random(self.shape) < 0.7)
        floats = x, w.T if self.is_tied else w, rng.standard_normal(V), weights
        return *(np.float32(a) for a in floats), np.int32(labels)


def _optax(s, labels):
    return optax.softmax_cross_entropy_with_integer_labels(s, labels)


def _looked_up(s, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(s), labels[..., None], -1)[..., 0]


def _less(s, labels):
    hot = jax.nn.one_hot(labels, V)
    return jax.nn.logsumexp(s, -1) - (s * hot).sum(-1)


SPELLINGS = st.builds(
    Spelling,
    shape=st.sampled_from([(13,), (24,), (3, 7), (2, 8), (2, 2, 5)]),
    chunks=st.integers(2, 7),
    way=st.sampled_from(["optax", "log_softmax", "logsumexp"]),
    reduction=st.sampled_from(["mean", "sum", "counted", "weighted", "squared"]),
    labels=st.sampled_from(["words", "ignored", "others"]),
    is_tied=st.booleans(),
    has_bias=st.booleans(),
    has_weights=st.booleans(),
    temperature=st.sampled_from([None, 0.7]),
    cap=st.sampled_from([None, 5.0]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    smoothing=st.sampled_from([0.0, 0.1]),
    is_scaled=st.booleans(),
)


SIMPLE = Spelling(
    shape=(3, 7), chunks=3, way="optax", reduction="counted", labels="others", is_tied=True,
    has_bias=True, has_weights=False, temperature=0.7, cap=5.0, z_loss=1e-2, smoothing=0.1,
    is_scaled=False,
)  # fmt: skip


def _check(spelling, order):
    """Values and gradients in float32, NaN for NaN."""
    args = spelling.operands()
    fn = jax.value_and_grad(spelling, (0, 1, 2, 3)) if order == "joint" else spelling
    closed = jax.make_jaxpr(fn)(*args)

    def chunks(sizes, word, program):
        return min(spelling.chunks, sizes.tokens * sizes.devices)

    with mock.patch.object(losses, "chunks_for", chunks):
        found = losses.chunk_losses(closed, CHUNKED)
    assert [loss.chunks for loss in found.found] == [min(spelling.chunks, spelling.shape[-1])]
    runs = [
        _leaves(of, order, operands)
        for of, operands in (
            (found.jaxpr, args), (closed, args), (closed, tolerances.moved(args, "float32"))
        )
    ]  # fmt: skip
    for i, (got, want, nudged) in enumerate(zip(*runs, strict=True)):
        limit = tolerances.bound("fused", min(i, 1), "float32", want, nudged)
        np.testing.assert_allclose(got, want, rtol=0, atol=limit)


def _leaves(closed, order, args):
    fn = jaxpr_as_fun(closed)
    if order == "forward":
        fn = jax.value_and_grad(lambda *operands: jaxpr_as_fun(closed)(*operands)[0], (0, 1, 2, 3))
    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn, compiler_options=_QUICK)(*args))]


@settings(phases=[Phase.explicit], deadline=None)
@example(SIMPLE, "forward")
@example(SIMPLE._replace(way="log_softmax", temperature=None, smoothing=0.0), "forward")
@example(SIMPLE._replace(way="log_softmax", labels="ignored", has_weights=True), "joint")
@given(SPELLINGS, st.sampled_from(["forward", "joint"]))
def test_a_few_losses(spelling, order):
    """Three of those below."""
    _check(spelling, order)


@pytest.mark.long
@settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate], max_examples=drawn(150), deadline=None
)
@given(SPELLINGS, st.sampled_from(["forward", "joint"]))
def test_random_losses(spelling, order):
    """Weights, masks, labels that are no words, caps, temperatures, biases, tied or not."""
    _check(spelling, order)
