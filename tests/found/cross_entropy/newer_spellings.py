"""Spellings of losses of 2026, written before anything was looked for in them."""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from tests.found.attention.corpus import Program, made, written
from tests.found.cross_entropy.spellings import (
    B,
    D,
    T,
    V,
    batch,
    masked,
    preferred,
    sampled,
    signed,
    tied,
    weighted,
)  # fmt: skip
from tests.programs.registry import Args, Draw

NEWER: dict[str, Program] = {}
NOT_FOUND = {
    ("rank_of_the_label", "forward"): "logits are read by reduce_max",  # of all tokens
    ("rank_of_the_label", "joint"):
        "cotangents depend on more than one sum over tokens after another",
}  # fmt: skip
"""Per program and order, why it is left alone."""

loss = partial(written, NEWER, operands=False)
package = partial(made, NEWER)
ce = optax.softmax_cross_entropy_with_integer_labels


@loss(weighted)
def wmt_smoothing(x, w, labels, weights):
    """As in flax's examples: confidence, low confidence and a normalizing constant."""
    logits = x @ w
    confidence = 0.9
    low = 0.1 / (V - 1)
    constant = -(confidence * jnp.log(confidence) + (V - 1) * low * jnp.log(low + 1e-20))
    targets = jnp.where(jax.nn.one_hot(labels, V) > 0, confidence, low)
    losses = -jnp.sum(targets * nn.log_softmax(logits), axis=-1) - constant
    return (losses * weights).sum() / weights.sum()


def packed(d: Draw) -> Args:
    """A batch, and the segment of each token."""
    segments = np.sort(d.integers(3, B, T), axis=1)
    return *batch(d), segments.astype(np.int32)


@loss(packed)
def packed_sequences(x, w, labels, segments):
    """Tokens whose next one is of the same segment, and not of the padding."""
    losses = ce((x @ w)[:, :-1], labels[:, 1:])
    keep = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    return jnp.where(keep, losses, 0.0).sum() / jnp.clip(keep.sum(), 1)


@loss(packed)
def mean_of_each_segment(x, w, labels, segments):
    losses = ce(x @ w, labels)
    at = (segments + 3 * jnp.arange(B)[:, None]).reshape(-1)
    total = jax.ops.segment_sum(losses.reshape(-1), at, num_segments=3 * B)
    count = jax.ops.segment_sum(jnp.ones_like(losses).reshape(-1), at, num_segments=3 * B)
    return (total / jnp.maximum(count, 1)).mean()


@loss(lambda d: (*sampled(d), d.mask(B, T), d.normal(B, T, D), d.weight(D, V)))
def grpo_with_a_reference(x, w, labels, before, advantages, mask, y, frozen):
    """Clipped higher than lower, k3 against a reference, a mean over a completion's tokens."""

    def logps(x, w):
        logits = x @ w / 0.9
        return jnp.take_along_axis(logits, labels[..., None], -1).squeeze(-1) - jax.nn.logsumexp(
            logits, -1
        )

    logp, ref = logps(x, w), lax.stop_gradient(logps(y, frozen))
    ratio = jnp.exp(logp - before)
    policy = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.28) * advantages)
    kl = jnp.exp(ref - logp) - (ref - logp) - 1
    each = ((policy + 0.04 * kl) * mask).sum(-1) / jnp.maximum(mask.sum(-1), 1)
    clipped = ((ratio > 1.28) & mask).sum() / mask.sum()
    return each.mean(), {"kl": (kl * mask).sum() / mask.sum(), "clipped": clipped}


@loss(lambda d: (*sampled(d), d.mask(B, T)))
def gspo(x, w, labels, before, advantages, mask):
    """One ratio for a sequence."""
    logp = jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[..., None], -1)[..., 0]
    delta = ((logp - before) * mask).sum(-1) / mask.sum(-1)
    ratio, advantage = jnp.exp(delta), advantages.mean(-1)
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.97, 1.03) * advantage).mean()


@loss(lambda d: (*batch(d), d.normal(3, D, D)))
def several_tokens_ahead(x, w, labels, layers):
    """Heads that share the unembedding, for the next tokens but one, two, ..."""
    total = 0.0
    for ahead, layer in enumerate(layers):
        logits = (x + jax.nn.silu(x @ layer)) @ w
        losses = ce(logits, jnp.roll(labels, -ahead, axis=1))
        inside = jnp.arange(T) < T - ahead
        total += 0.3**ahead * (losses * inside).sum() / (B * inside.sum())
    return total


@loss(lambda d: (*batch(d), d.normal(3, D, D)))
def medusa_heads(x, w, labels, layers):
    """All heads in one product."""
    hidden = x[:, :, None] + jax.nn.silu(jnp.einsum("btd,kde->btke", x, layers))
    logits = jnp.einsum("btke,ev->btkv", hidden, w)
    targets = jnp.stack([jnp.roll(labels, -k - 1, 1) for k in range(3)], -1)
    return (ce(logits, targets) * jnp.array([1.0, 0.8, 0.64])).mean()


@loss(batch)
def capped_and_padded(x, w, labels):
    logits = jnp.tanh(x @ w / 15.0) * 15.0
    logits = jnp.where(jnp.arange(V) < V - 7, logits, -jnp.inf)
    return ce(logits.astype(jnp.float32), labels % (V - 7)).mean()


@loss(batch)
def padded_by_adding(x, w, labels):
    bias = jnp.where(jnp.arange(V) >= V - 7, jnp.finfo(jnp.float32).min, 0.0)
    logp = jax.nn.log_softmax(x @ w + bias, axis=-1)
    return -jnp.take_along_axis(logp, (labels % (V - 7))[..., None], axis=-1).squeeze(-1).mean()


@loss(batch)
def padded_by_slicing(x, w, labels):
    """The vocabulary is a multiple of something; its tail is cut off the logits."""
    return ce((x @ w)[..., : V - 7], labels % (V - 7)).mean()


@loss(batch)
def padded_by_setting(x, w, labels):
    logits = (x @ w).at[..., V - 7 :].set(-jnp.inf)
    return ce(logits, labels % (V - 7)).mean()


@loss(signed)
def ignored_and_safe(x, w, labels):
    logits = (x @ w).reshape(-1, V)
    labels = labels.reshape(-1)
    valid = labels != -100
    safe = jnp.where(valid, labels, 0)
    nll = -jax.nn.log_softmax(logits, axis=-1)[jnp.arange(labels.shape[0]), safe]
    return jnp.where(valid, nll, 0.0).sum() / jnp.maximum(valid.sum(), 1)


@loss(lambda d: (*batch(d), d.uniform(V, low=0.5, high=2.0)))
def weighted_by_class(x, w, labels, of_class):
    """As torch's `weight`, with smoothing as torch has it."""
    logp = jax.nn.log_softmax(x @ w)
    each = of_class[labels]
    nll = -(each * jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]).sum() / each.sum()
    smooth = -(logp * of_class).sum(-1).sum() / each.sum()
    return 0.9 * nll + 0.1 / V * smooth


@loss(masked)
def optax_where_and_poly(x, w, labels, mask):
    logits, targets = x @ w, jax.nn.one_hot(labels, V)
    return jnp.mean(optax.losses.poly_loss_cross_entropy(logits, targets, epsilon=1.0), where=mask)


@loss(batch)
def optax_kl_to_smoothed(x, w, labels):
    targets = optax.smooth_labels(jax.nn.one_hot(labels, V), 0.1)
    return optax.losses.kl_divergence(jax.nn.log_softmax(x @ w), targets).mean()


@loss(batch)
def optax_safe(x, w, labels):
    return optax.losses.safe_softmax_cross_entropy(x @ w, jax.nn.one_hot(labels, V)).mean()


@loss(batch)
def first_word_is_right(x, w, labels):
    logits = x @ w + jax.nn.one_hot(labels, V)
    return (jax.nn.logsumexp(logits, -1) - logits[..., 0]).mean()


@loss(lambda d: (*batch(d), d.integers(V, B, T)))
def unlikelihood(x, w, labels, bad):
    logp = jax.nn.log_softmax(x @ w)
    good = jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]
    p = jnp.exp(jnp.take_along_axis(logp, bad[..., None], -1)[..., 0])
    return -(good + jnp.log(jnp.clip(1 - p, 1e-5))).mean()


@loss(lambda d: (*batch(d), d.integers(V, B, T, 4), d.normal(B, T, 4)))
def distilled_from_the_top(x, w, labels, words, teacher):
    """A teacher's best words alone, with the rest in one bucket."""
    logp = jax.nn.log_softmax(x @ w)
    student = jnp.take_along_axis(logp, words, axis=-1)
    p = jax.nn.softmax(teacher)
    kd = (p * (jnp.log(p) - student)).sum(-1)
    return 0.5 * kd.mean() - 0.5 * jnp.take_along_axis(logp, labels[..., None], -1).mean()


@loss(preferred)
def simpo_concatenated(x, y, w, chosen, rejected, before_chosen, before_rejected):
    """Both answers in one batch, mean log-probabilities, a margin; SFT on the chosen."""
    del before_chosen, before_rejected
    hidden, labels = jnp.concatenate([x, y]), jnp.concatenate([chosen, rejected])
    logits = (hidden @ w)[:, :-1]
    logp = -ce(logits, labels[:, 1:])
    mean = logp.mean(-1)
    return -jax.nn.log_sigmoid(2.0 * (mean[:B] - mean[B:]) - 0.5).mean() - 0.1 * logp[:B].mean()


@loss(batch)
def rank_of_the_label(x, w, labels):
    """Accuracy among five, by counting greater logits, and mean probability, beside the loss."""
    logits = x @ w
    chosen = jnp.take_along_axis(logits, labels[..., None], -1)
    top5 = (logits > chosen).sum(-1) < 5
    mean = (jax.nn.logsumexp(logits, -1) - chosen[..., 0]).mean()
    return mean, {
        "top5": top5.mean(),
        "largest": logits.max(),
        "z": jax.nn.logsumexp(logits, -1).mean(),
    }


@loss(lambda d: (d.normal(B * T, D), d.normal(B * T, D), d.normal(V, D)))
def moco_queue(q, k, queue):
    q = q / jnp.linalg.norm(q, axis=-1, keepdims=True)
    pos = jnp.einsum("nc,nc->n", q, lax.stop_gradient(k))[:, None]
    neg = jnp.einsum("nc,kc->nk", q, queue)
    logits = jnp.concatenate([pos, neg], 1) / 0.2
    return ce(logits, jnp.zeros(B * T, jnp.int32)).mean()


@loss(lambda d: (*batch(d), d.integers(T, B, 16)))
def bert_positions(x, w, labels, at):
    """The hidden states of masked tokens alone."""
    hidden = jnp.take_along_axis(x, at[..., None], axis=1)
    targets = jnp.take_along_axis(labels, at, axis=1)
    logp = jax.nn.log_softmax(jax.nn.gelu(hidden) @ w)
    return -(jax.nn.one_hot(targets, V) * logp).sum(-1).mean()


@loss(batch)
def chunked_by_hand(x, w, labels):
    @jax.checkpoint
    def of(x, labels):
        return ce(x @ w, labels).sum()

    xs, ls = x.reshape(4, -1, D), labels.reshape(4, -1)
    return lax.map(lambda a: of(*a), (xs, ls)).sum() / labels.size


@loss(tied)
def rolled_labels(words, table, layer):
    """Targets are rolled, and the last one is masked."""
    h = jnp.tanh(jnp.take(table, words, axis=0) @ layer)
    logits = jnp.einsum("...d,vd->...v", h, table) * D**-0.5
    targets = jnp.roll(words, -1, axis=-1)
    mask = jnp.ones_like(words, jnp.float32).at[:, -1].set(0.0)
    target = jax.nn.one_hot(targets, V, dtype=jnp.float32)
    losses = jax.nn.logsumexp(logits, -1) - jnp.sum(logits * target, -1)
    z = 1e-4 * jax.nn.logsumexp(logits, -1) ** 2
    return jnp.sum((losses + z) * mask) / jnp.sum(mask)


@package("flax")
def nnx_model_and_grad():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.RMSNorm(D, rngs=rngs)
            self.head = nnx.Einsum("btd,dv->btv", (D, V), (V,), rngs=rngs)

        def __call__(self, x):
            return self.head(self.norm(x))

    graph, state = nnx.split(Model(nnx.Rngs(0)))
    x, _, labels = batch(Draw("nnx_model"))

    def of(state, x, labels):
        logits = nnx.merge(graph, state)(x)
        logits = 30.0 * nnx.tanh(logits / 30.0)
        logp = nnx.log_softmax(logits, axis=-1)
        return -jnp.take_along_axis(logp, labels[..., None], axis=-1).mean()

    return of, (state, x, labels)
