"""Spellings of a softmax cross-entropy of logits, and of what people compute beside it.

They were written before anything was looked for in them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from tests.found.attention.corpus import Program, made, written
from tests.programs.registry import Args, Draw

B, T, D, V = 2, 24, 8, 192
"""Examples, tokens, width and words."""

LOSSES: dict[str, Program] = {}
NOT_FOUND: dict[tuple[str, str], str] = {
    ("gradients_in_a_scan", "joint"): "logits are returned",  # a gradient of a gradient
}
"""Per program and order, why it is left alone."""


def batch(d: Draw) -> Args:
    """Activations [B, T, D], a head [D, V] and labels [B, T]."""
    return d.normal(B, T, D), d.weight(D, V), d.integers(V, B, T)


def rows(d: Draw) -> Args:
    """Activations [B·T, D], a head [D, V] and labels [B·T]."""
    return d.normal(B * T, D), d.weight(D, V), d.integers(V, B * T)


def weighted(d: Draw) -> Args:
    """A batch, and a weight of each token."""
    return *batch(d), d.uniform(B, T)


def masked(d: Draw) -> Args:
    """A batch, and which tokens count."""
    return *batch(d), d.mask(B, T)


def biased(d: Draw) -> Args:
    """A batch, and a bias of each word."""
    return *batch(d), d.normal(V)


def tied(d: Draw) -> Args:
    """Words [B, T], an embedding [V, D] and a layer [D, D]."""
    return d.integers(V, B, T), d.normal(V, D), d.weight(D, D)


def signed(d: Draw) -> Args:
    """A batch in which ignored labels are -100."""
    x, w, labels = batch(d)
    return x, w, np.where(d.mask(B, T), labels, -100).astype(np.int32)


def preferred(d: Draw) -> Args:
    """Two batches, a head, two rows of labels, and log-probabilities under another model."""
    words = d.integers(V, B, T), d.integers(V, B, T)
    return d.normal(B, T, D), d.normal(B, T, D), d.weight(D, V), *words, d.normal(B), d.normal(B)


def sampled(d: Draw) -> Args:
    """A batch, log-probabilities of before, and advantages."""
    return *batch(d), -d.uniform(B, T, low=2.0, high=6.0), d.normal(B, T)


def after_a_layer(d: Draw) -> Args:
    """A batch, and a layer that is as wide as the head."""
    return *batch(d), d.weight(D, V)


loss = partial(written, LOSSES, operands=False)
package = partial(made, LOSSES)


# optax


@loss(batch)
def optax_integer(x, w, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()


@loss(after_a_layer)
def after_layers_as_wide_as_the_head(x, w, labels, layer):
    for _ in range(2):
        x = x + jnp.tanh(x @ layer) @ layer.T
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()


@loss(batch)
def optax_integer_per_token(x, w, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)


@loss(batch)
def optax_one_hot(x, w, labels):
    return optax.softmax_cross_entropy(x @ w, jax.nn.one_hot(labels, V)).mean()


@loss(batch)
def optax_smoothed(x, w, labels):
    targets = optax.smooth_labels(jax.nn.one_hot(labels, V), 0.1)
    return optax.softmax_cross_entropy(x @ w, targets).mean()


@loss(masked)
def optax_where(x, w, labels, mask):
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)
    return jnp.mean(losses, where=mask)


@loss(rows)
def optax_rows(x, w, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits=x @ w, labels=labels).sum()


# log_softmax


@loss(batch)
def log_softmax_take(x, w, labels):
    logp = jax.nn.log_softmax(x @ w)
    return -jnp.take_along_axis(logp, labels[..., None], axis=-1).mean()


@loss(batch)
def printed_as_it_is_computed(x, w, labels):
    value = log_softmax_take(x, w, labels)
    jax.debug.print("{}", value)
    return value


@loss(batch)
def log_softmax_one_hot(x, w, labels):
    return -jnp.mean(jnp.sum(jax.nn.one_hot(labels, V) * jax.nn.log_softmax(x @ w), axis=-1))


@loss(batch)
def log_softmax_einsum(x, w, labels):
    logp = jax.nn.log_softmax(jnp.einsum("btd,dv->btv", x, w))
    return -jnp.einsum("btv,btv->bt", logp, jax.nn.one_hot(labels, V)).mean()


@loss(rows)
def log_softmax_indexed(x, w, labels):
    return -jax.nn.log_softmax(x @ w)[jnp.arange(B * T), labels].mean()


@loss(batch)
def log_softmax_indexed_twice(x, w, labels):
    logp = jax.nn.log_softmax(x @ w)
    return -logp[jnp.arange(B)[:, None], jnp.arange(T)[None], labels].sum() / (B * T)


@loss(batch)
def log_of_softmax(x, w, labels):
    p = jax.nn.softmax(x @ w, axis=-1)
    return -jnp.log(jnp.take_along_axis(p, labels[..., None], -1) + 1e-9).mean()


@loss(batch)
def log_softmax_vmapped_index(x, w, labels):
    pick = jax.vmap(jax.vmap(lambda row, label: row[label]))
    return -pick(jax.nn.log_softmax(x @ w), labels).mean()


# logsumexp less a logit


@loss(batch)
def logsumexp_take(x, w, labels):
    logits = x @ w
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()


@loss(batch)
def logsumexp_one_hot(x, w, labels):
    logits = x @ w
    picked = jnp.einsum("btv,btv->bt", logits, jax.nn.one_hot(labels, V))
    return (jax.scipy.special.logsumexp(logits, axis=-1) - picked).mean()


@loss(batch)
def by_hand(x, w, labels):
    logits = x @ w
    logits = logits - lax.stop_gradient(logits.max(-1, keepdims=True))
    log_z = jnp.log(jnp.exp(logits).sum(-1))
    return (log_z - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]).mean()


@loss(batch)
def by_hand_maximum_not_stopped(x, w, labels):
    logits = x @ w
    logits = logits - logits.max(-1, keepdims=True)
    log_z = jnp.log(jnp.exp(logits).sum(-1))
    return (log_z - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]).mean()


@loss(batch)
def by_hand_no_maximum(x, w, labels):
    logits = x @ w
    picked = jnp.where(jnp.arange(V) == labels[..., None], logits, 0.0).sum(-1)
    return (jnp.log(jnp.exp(logits).sum(-1)) - picked).mean()


@loss(batch)
def t5x_style(x, w, labels):
    """As in T5X and MaxText: one-hot targets, and a z-loss beside."""
    logits = x @ w
    targets = jax.nn.one_hot(labels, V)
    top = logits.max(axis=-1, keepdims=True)
    shifted = logits - lax.stop_gradient(top)
    log_z = jnp.squeeze(top + jnp.log(jnp.sum(jnp.exp(shifted), -1, keepdims=True)), -1)
    log_softmax = logits - log_z[..., None]
    losses = -jnp.sum(targets * log_softmax, axis=-1)
    return jnp.sum(losses + 1e-4 * jnp.square(log_z)) / (B * T)


# what people add


@loss(batch)
def z_loss(x, w, labels):
    logits = x @ w
    log_z = jax.nn.logsumexp(logits, axis=-1)
    losses = log_z - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return losses.mean() + 1e-4 * jnp.square(log_z).mean()


@loss(batch)
def soft_cap(x, w, labels):
    logits = 30.0 * jnp.tanh(x @ w / 30.0)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@loss(batch)
def temperature(x, w, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w / 0.7, labels).mean()


@loss(lambda d: (*batch(d), np.float32(1.3)))
def learnt_temperature(x, w, labels, scale):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w * scale, labels).mean()


@loss(biased)
def bias(x, w, labels, b):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w + b, labels).mean()


@loss(biased)
def prior(x, w, labels, b):
    """Logits corrected by how often words are."""
    logits = x @ w + jax.nn.log_softmax(b)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@loss(tied)
def tied_embedding(words, table, layer):
    x = jnp.tanh(table[words] @ layer)
    logits = x @ table.T
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], words[:, 1:]).mean()


@loss(tied)
def tied_einsum(words, table, layer):
    x = jnp.tanh(table[words[:, :-1]] @ layer)
    logits = jnp.einsum("btd,vd->btv", x, table)
    return optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 1:]).mean()


@loss(weighted)
def weights(x, w, labels, each):
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)
    return (losses * each).sum() / each.sum()


@loss(masked)
def counted_tokens(x, w, labels, mask):
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)
    return jnp.where(mask, losses, 0.0).sum() / jnp.maximum(mask.sum(), 1)


@loss(signed)
def ignored_labels(x, w, labels):
    is_word = labels != -100
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, jnp.where(is_word, labels, 0))
    return (losses * is_word).sum() / is_word.sum()


@loss(signed)
def ignored_as_they_are(x, w, labels):
    """A negative label counts from the end; -100 is a word here, and weighs nothing."""
    logp = jax.nn.log_softmax(x @ w)
    picked = jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]
    return -(picked * (labels >= 0)).sum()


@loss(batch)
def class_weights(x, w, labels):
    scale = jnp.linspace(0.5, 2.0, V)
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)
    return (losses * scale[labels]).mean()


@loss(batch)
def focal(x, w, labels):
    logp = jax.nn.log_softmax(x @ w)
    picked = jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]
    return -(jnp.square(1 - jnp.exp(picked)) * picked).mean()


@loss(batch)
def entropy_bonus(x, w, labels):
    logp = jax.nn.log_softmax(x @ w)
    picked = jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    return -(picked + 0.01 * entropy).mean()


@loss(batch)
def smoothed_by_hand(x, w, labels):
    logp = jax.nn.log_softmax(x @ w)
    picked = jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]
    return -(0.9 * picked + 0.1 * logp.mean(-1)).mean()


@loss(batch)
def padded_words(x, w, labels):
    """Words that pad the vocabulary have no probability."""
    logits = jnp.where(jnp.arange(V) < V - 5, x @ w, -1e9)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels % (V - 5)).mean()


@loss(batch)
def normalized_last(x, w, labels):
    x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()


# shapes


@loss(batch)
def shifted_logits(x, w, labels):
    logits = (x @ w)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels[:, 1:]).mean()


@loss(batch)
def shifted_and_flattened(x, w, labels):
    logits = (x @ w)[..., :-1, :].reshape(-1, V)
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, labels[..., 1:].reshape(-1)
    ).mean()


@loss(batch)
def flattened_logits(x, w, labels):
    logits = (x @ w).reshape(-1, V)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels.reshape(-1)).mean()


@loss(batch)
def flattened_before(x, w, labels):
    logits = x.reshape(-1, D) @ w
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels.reshape(-1)).mean()


@loss(batch)
def words_first(x, w, labels):
    logits = jnp.einsum("btd,dv->vbt", x, w)
    picked = jnp.take_along_axis(logits, labels[None], axis=0)[0]
    return (jax.nn.logsumexp(logits, axis=0) - picked).mean()


@loss(lambda d: (d.normal(T, B, D), d.weight(D, V), d.integers(V, T, B)))
def time_first(x, w, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()


@loss(lambda d: (d.normal(B, T, 2, D // 2), d.weight(D, V), d.integers(V, B, T)))
def heads_merged(x, w, labels):
    logits = x.reshape(B, T, D) @ w
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@loss(
    lambda d: (d.normal(B, T, 2, D // 2), d.weight(D, V).reshape(2, D // 2, V), d.integers(V, B, T))
)
def two_axes_contracted(x, w, labels):
    logits = jnp.einsum("btkd,kdv->btv", x, w)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@loss(batch)
def one_example_under_vmap(x, w, labels):
    def one(x, labels):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()

    return jax.vmap(one)(x, labels).mean()


@loss(batch)
def one_token_under_vmap(x, w, labels):
    def one(x, label):
        return -jax.nn.log_softmax(w.T @ x)[label]

    return jax.vmap(jax.vmap(one))(x, labels).mean()


# transforms


@loss(batch)
def under_jit(x, w, labels):
    def of(x, w, labels):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()

    return jax.jit(of)(x, w, labels)


@loss(batch)
def under_checkpoint(x, w, labels):
    def of(x, w):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()

    return jax.checkpoint(of)(x, w)


@loss(lambda d: (d.normal(3, B, T, D), d.weight(D, V), d.integers(V, 3, B, T)))
def micro_batches_in_a_scan(xs, w, labels):
    def step(total, of):
        x, labels = of
        value = optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()
        return total + value, None

    return lax.scan(jax.checkpoint(step), 0.0, (xs, labels))[0]


@loss(lambda d: (d.normal(3, B, T, D), d.weight(D, V), d.integers(V, 3, B, T)))
def gradients_in_a_scan(xs, w, labels):
    """Micro-batches whose gradients are added up, inside of the program."""

    def of(w, x, labels):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()

    def step(total, batch):
        value, grads = jax.value_and_grad(of)(w, *batch)
        return total + grads, value

    grads, values = lax.scan(step, jnp.zeros_like(w), (xs, labels))
    return values.sum(), grads


@loss(batch)
def accuracy_beside(x, w, labels):
    logits = x @ w
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), (logits.argmax(-1) == labels).mean()


@loss(weighted)
def accuracy_and_weights(x, w, labels, each):
    logits = x @ w
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    correct = jnp.equal(jnp.argmax(logits, axis=-1), labels)
    return (losses * each).sum() / each.sum(), (correct * each).sum() / each.sum()


@loss(batch)
def perplexity(x, w, labels):
    return jnp.exp(optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean())


# log-probabilities of tokens


def _logp(x, w, labels):
    logp = jax.nn.log_softmax(x @ w)
    return jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]


@loss(batch)
def token_log_probabilities(x, w, labels):
    return _logp(x, w, labels)


@loss(masked)
def sequence_log_probabilities(x, w, labels, mask):
    return (_logp(x, w, labels) * mask).sum(-1)


@loss(preferred)
def dpo(x, y, w, chosen, rejected, before_chosen, before_rejected):
    better = _logp(x, w, chosen).sum(-1) - before_chosen
    worse = _logp(y, w, rejected).sum(-1) - before_rejected
    return -jax.nn.log_sigmoid(0.1 * (better - worse)).mean()


@loss(sampled)
def ppo(x, w, labels, before, advantages):
    ratio = jnp.exp(_logp(x, w, labels) - before)
    clipped = jnp.clip(ratio, 0.8, 1.2)
    return -jnp.minimum(ratio * advantages, clipped * advantages).mean()


@loss(sampled)
def grpo(x, w, labels, before, advantages):
    logp = _logp(x, w, labels)
    ratio = jnp.exp(logp - lax.stop_gradient(logp))
    drift = jnp.exp(before - logp) - (before - logp) - 1
    return -(ratio * advantages - 0.04 * drift).mean()


@loss(sampled)
def reinforce(x, w, labels, before, advantages):
    del before
    return -(_logp(x, w, labels) * advantages).mean()


@loss(lambda d: (*batch(d), d.normal(B, T, D), d.weight(D, V)))
def reference_model_beside(x, w, labels, y, other):
    reference = lax.stop_gradient(_logp(y, other, labels))
    return -(_logp(x, w, labels) - reference).mean()


# packages


def _linen(module: Any, *args: Any) -> tuple[Callable[..., Any], Args]:
    params = module.init(jax.random.key(0), *args)
    return module.apply, (params, *args)


@package("flax")
def linen_dense():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, labels):
            logits = nn.Dense(V)(nn.LayerNorm()(x))
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    x, _, labels = batch(Draw("linen_dense"))
    return _linen(Model(), x, labels)


@package("flax")
def linen_attend():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, words):
            embed = nn.Embed(V, D)
            x = nn.Dense(D)(embed(words))
            logits = embed.attend(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, words).mean()

    return _linen(Model(), tied(Draw("linen_attend"))[0])


@package("flax")
def nnx_linear():
    head = nnx.Linear(D, V, use_bias=False, rngs=nnx.Rngs(0))
    graph, state = nnx.split(head)
    x, _, labels = batch(Draw("nnx_linear"))

    def of(state, x, labels):
        logits = nnx.merge(graph, state)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return of, (state, x, labels)


@package("flax")
def nnx_attend():
    embed = nnx.Embed(V, D, rngs=nnx.Rngs(0))
    graph, state = nnx.split(embed)
    words = tied(Draw("nnx_attend"))[0]

    def of(state, words):
        model = nnx.merge(graph, state)
        logits = model.attend(jnp.tanh(model(words)))
        return optax.softmax_cross_entropy_with_integer_labels(logits, words).mean()

    return of, (state, words)


@package("equinox")
def equinox_linear():
    head = eqx.nn.Linear(D, V, key=jax.random.key(0))
    params, static = eqx.partition(head, eqx.is_array)
    x, _, labels = batch(Draw("equinox_linear"))

    def of(params, x, labels):
        model = eqx.combine(params, static)
        logits = jax.vmap(jax.vmap(model))(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return of, (params, x, labels)


@package("equinox")
def equinox_example_under_vmap():
    head = eqx.nn.Linear(D, V, use_bias=False, key=jax.random.key(0))
    params, static = eqx.partition(head, eqx.is_array)
    x, _, labels = batch(Draw("equinox_example"))

    def of(params, x, labels):
        model = eqx.combine(params, static)

        def one(x, labels):
            logits = jax.vmap(model)(x)
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

        return jax.vmap(one)(x, labels).mean()

    return of, (params, x, labels)


@package("haiku")
def haiku_linear():
    def of(x, labels):
        logits = hk.Linear(V)(x)
        return -(jax.nn.one_hot(labels, V) * jax.nn.log_softmax(logits)).sum() / labels.size

    model = hk.without_apply_rng(hk.transform(of))
    x, _, labels = batch(Draw("haiku_linear"))
    return model.apply, (model.init(jax.random.key(0), x, labels), x, labels)


# haliax, and the heads of transformers' Flax models


def several(d: Draw) -> Args:
    """Activations [B, T, D], three layers [D, D] and heads [D, V], and labels [B, T] of each."""
    return d.normal(B, T, D), d.normal(3, D, D), d.normal(3, D, V), d.integers(V, 3, B, T)


@loss(several)
def heads_mapped_over(x, layers, heads, labels):
    def one(layer, head, labels):
        logits = jnp.tanh(x @ layer) @ head
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return jax.vmap(one)(layers, heads, labels).mean()


@loss(several)
def heads_in_one_product(x, layers, heads, labels):
    logits = jnp.einsum("btd,hdv->bthv", jnp.tanh(x @ layers[0]), heads)
    chosen = jnp.take_along_axis(logits, jnp.moveaxis(labels, 0, -1)[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - chosen).mean()


def _named(x, w):
    tokens = hax.named(x, ("batch", "position", "embed"))
    return tokens.dot(hax.named(w, ("embed", "vocab")), axis="embed")


@loss(batch)
def haliax_one_hot(x, w, labels):
    vocab = hax.Axis("vocab", V)
    targets = hax.nn.one_hot(hax.named(labels, ("batch", "position")), vocab)
    return hax.nn.cross_entropy_loss(_named(x, w), vocab, targets).scalar()


@loss(batch)
def haliax_log_normalizers(x, w, labels):
    vocab = hax.Axis("vocab", V)
    targets = hax.nn.one_hot(hax.named(labels, ("batch", "position")), vocab)
    losses, normalizers = hax.nn.cross_entropy_loss_and_log_normalizers(
        _named(x, w), vocab, targets
    )
    return hax.mean(losses + 1e-4 * normalizers**2).scalar()


@loss(tied)
def transformers_flax_tied_head(words, table, layer):
    hidden = jnp.tanh(table[words] @ layer)
    logits = nn.Dense(V, use_bias=False).apply({"params": {"kernel": table.T}}, hidden)
    shifted, targets = logits[..., :-1, :], jax.nn.one_hot(words[..., 1:], V)
    return optax.softmax_cross_entropy(shifted, targets).mean()
