"""Spellings of losses with a derivative of their own, written before anything was looked for."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from tests.found.attention.corpus import Program, written
from tests.found.cross_entropy.spellings import D, V, batch, biased, masked, rows, weighted

RULED: dict[str, Program] = {}
NOT_FOUND = {
    ("by_custom_jvp", "joint"): "its softmax has a rule for tangents, and it is not one number",
    ("rule_centres_over_tokens", "forward"):
        "its softmax has a derivative rule that is not of each token",
}  # fmt: skip
"""Per program and order, why it is left alone."""

loss = partial(written, RULED, operands=False)


@jax.custom_vjp
def _t5x(logits, targets, z_loss):
    total = jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
    log_z = jnp.squeeze(total, axis=-1)
    z = z_loss * lax.square(log_z)
    return -jnp.sum(targets * (logits - total), axis=-1) + z, z


def _t5x_fwd(logits, targets, z_loss=0.0):
    top = logits.max(axis=-1, keepdims=True)
    shifted = logits - top
    exps = jnp.exp(shifted)
    total = jnp.sum(exps, axis=-1, keepdims=True)
    logp = shifted - jnp.log(total)
    log_z = jnp.squeeze(jnp.log(total) + top, axis=-1)
    z = z_loss * lax.square(log_z)
    saved = (logits, targets, z_loss, exps, total, logp, log_z)
    return (-jnp.sum(targets * logp, axis=-1) + z, z), saved


def _t5x_bwd(saved, g):
    logits, targets, z_loss, exps, total, logp, log_z = saved
    g = g[0][..., None]  # that of the z-loss is for logs
    deriv = (1 + 2 * z_loss * log_z)[..., None] * exps / total - targets
    return jnp.asarray(g * deriv, logits.dtype), jnp.asarray(-g * logp, targets.dtype), 0.0


_t5x.defvjp(_t5x_fwd, _t5x_bwd)


def _saves_logits(logits, labels):
    """Integer labels; the backward pass computes the softmax of logits again."""
    top = jax.nn.logsumexp(logits, axis=-1)
    return top - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]


def _saves_logits_bwd(saved, g):
    logits, labels = saved
    p = jax.nn.softmax(logits, axis=-1)
    return g[..., None] * (p - jax.nn.one_hot(labels, logits.shape[-1])), None


by_logits = jax.custom_vjp(_saves_logits)
by_logits.defvjp(lambda x, labels: (_saves_logits(x, labels), (x, labels)), _saves_logits_bwd)


@loss(weighted)
def t5x_weighted(x, w, labels, weights):
    """Label smoothing in the targets, a z-loss, weights, a constant that normalizes."""
    confidence, low = 0.9, 0.1 / (V - 1)
    constant = -(confidence * jnp.log(confidence) + (V - 1) * low * jnp.log(low + 1e-20))
    targets = jnp.where(labels[..., None] == jnp.arange(V), confidence, low)
    losses, z = _t5x(x @ w, lax.convert_element_type(targets, jnp.float32), 1e-4)
    losses = (losses - constant) * weights
    return jnp.sum(losses) / 512.0, {"z": jnp.sum(z * weights), "weights": jnp.sum(weights)}


@loss(masked)
def maxtext_segments(x, w, labels, mask):
    targets = jax.nn.one_hot(labels, V)
    losses, z = _t5x((x @ w).astype(jnp.float32), targets, z_loss=1e-4)
    total, weights = jnp.sum(losses * mask), jnp.sum(mask)
    return total / (weights + 1e-8), {"z": jnp.sum(z * mask) / (weights + 1e-8), "n": weights}


@loss(batch)
def rule_alone(x, w, labels):
    return _t5x(x @ w, jax.nn.one_hot(labels, V), 0.0)[0].mean()


@loss(rows)
def rule_over_two_axes(x, w, labels):
    return by_logits(x @ w, labels).sum()


@loss(lambda d: (*weighted(d), d.normal(V)))
def rule_of_flattened_logits(x, w, labels, weights, bias):
    logits = 30.0 * jnp.tanh((x @ w + bias) / 30.0)
    losses = by_logits(logits.reshape(-1, V), labels.reshape(-1))
    return (losses * weights.reshape(-1)).sum() / weights.sum()


@loss(batch)
def rule_per_token(x, w, labels):
    return by_logits(x @ w, labels)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _smoothed(logits, labels, smoothing, axis):
    return _smoothed_fwd(logits, labels, smoothing, axis)[0]


def _smoothed_fwd(logits, labels, smoothing, axis):
    """Smooth inside, in float32, and save probabilities."""
    wide = logits.astype(jnp.float32)
    logp = jax.nn.log_softmax(wide, axis=axis)
    at = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    targets = jnp.where(at == labels[..., None], 1 - smoothing, smoothing / logits.shape[-1])
    return -(targets * logp).sum(axis), (jnp.exp(logp), targets, jnp.zeros((0,), logits.dtype))


def _smoothed_bwd(smoothing, axis, saved, g):
    p, targets, like = saved
    return ((p - targets) * jnp.expand_dims(g, axis)).astype(like.dtype), None


_smoothed.defvjp(_smoothed_fwd, _smoothed_bwd)


@loss(masked)
def nondiff_smoothing_masked_mean(x, w, labels, mask):
    return jnp.mean(_smoothed(x @ w, labels, 0.1, -1), where=mask)


@loss(lambda d: (d.normal(4, 12, D), d.weight(D, V), d.integers(V, 4, 12)))
def rule_in_a_checkpointed_scan(xs, w, labels):
    @jax.checkpoint
    def step(total, given):
        x, labels = given
        losses, _ = _t5x(jnp.sin(x) @ w, jax.nn.one_hot(labels, V), 1e-4)
        return total + losses.sum(), None

    return lax.scan(step, 0.0, (xs, labels))[0] / labels.size


@jax.custom_vjp
def _mean(logits, labels, mask):
    return _mean_fwd(logits, labels, mask)[0]


def _mean_fwd(logits, labels, mask):
    """Ignore tokens and take the mean inside, as torch does; count what is right."""
    shifted = logits - logits.max(-1, keepdims=True)
    exps = jnp.exp(shifted)
    total = exps.sum(-1, keepdims=True)
    own = jnp.take_along_axis(shifted, labels[..., None], -1)[..., 0]
    losses = jnp.where(mask, jnp.log(total)[..., 0] - own, 0.0)
    count = jnp.maximum(mask.sum(), 1)
    return losses.sum() / count, (exps, total, labels, mask, count)


def _mean_bwd(saved, g):
    exps, total, labels, mask, count = saved
    d = exps / total - jax.nn.one_hot(labels, exps.shape[-1])
    return d * (g * mask / count)[..., None], None, None


_mean.defvjp(_mean_fwd, _mean_bwd)


@loss(masked)
def mean_inside_of_the_rule(x, w, labels, mask):
    return _mean(x @ w, labels, mask)


@loss(masked)
def accuracy_beside_the_rule(x, w, labels, mask):
    logits = x @ w
    right = (jnp.argmax(logits, -1) == labels) & mask
    return by_logits(logits, labels).mean(where=mask), right.sum() / mask.sum()


@loss(batch)
def tempered_inside_of_the_rule(x, w, labels):
    """A temperature that is learned, whose derivative the rule leaves to JAX."""

    def of(logits, scale, labels):
        logp = jax.nn.log_softmax(logits * scale)
        return -jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]

    ruled = jax.custom_vjp(of)

    def fwd(logits, scale, labels):
        losses, pull = jax.vjp(lambda logits, scale: of(logits, scale, labels), logits, scale)
        return losses, pull

    ruled.defvjp(fwd, lambda pull, g: (*pull(g), None))
    return ruled(x @ w, x.mean() + 1.0, labels).mean()


@loss(batch)
def by_custom_jvp(x, w, labels):
    """As optax's safe softmax cross-entropy, per token."""

    @jax.custom_jvp
    def log_z(logits):
        return jax.nn.logsumexp(logits, axis=-1)

    @log_z.defjvp
    def _(primals, tangents):
        p = jax.nn.softmax(primals[0], axis=-1)
        return log_z(*primals), (p * tangents[0]).sum(-1)

    logits = x @ w
    return (log_z(logits) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]).mean()


CLASSES = jnp.linspace(0.5, 1.5, V)


@loss(batch)
def class_weights_captured(x, w, labels):
    """The rule reads an array that is no operand of it."""
    rule = jax.custom_vjp(lambda logits, labels: _saves_logits(logits, labels) * CLASSES[labels])
    rule.defvjp(
        lambda *given: (rule(*given), given),
        lambda saved, g: _saves_logits_bwd(saved, g * CLASSES[saved[1]]),
    )
    return rule(x @ w, labels).mean()


# Rules that are not the derivative of what they compute: they hold, as they are.


def _with(bwd):
    rule = jax.custom_vjp(_saves_logits)
    rule.defvjp(lambda x, labels: (_saves_logits(x, labels), (x, labels)), bwd)
    return rule


def _clipped(saved, g):
    """Clip a gradient per token, which is not linear in the cotangent."""
    d = _saves_logits_bwd(saved, 1e3 * g)[0]
    return d / jnp.maximum(jnp.sqrt(jnp.square(d).sum(-1, keepdims=True)), 1.0), None


clipped = _with(_clipped)


@loss(batch)
def clipped_cotangents(x, w, labels):
    return clipped(x @ w, labels).mean()


@loss(biased)
def another_gradient_added(x, w, labels, bias):
    """What is added to cotangents depends on that of no loss; the last chunk has fewer tokens."""
    rule = _with(lambda s, g: (_saves_logits_bwd(s, g)[0] + 1e-3 * jnp.tanh(s[0]), None))
    return rule(x[:, :-2] @ w + bias, labels[:, :-2]).mean()


@loss(batch)
def straight_through(x, w, labels):
    """Logits are rounded, and the gradient is that of those which are not."""

    @jax.custom_vjp
    def rounded(x):
        return jnp.round(x * 8) / 8

    rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (g,))
    return by_logits(rounded(x @ w), labels).mean()


@loss(batch)
def rule_centres_over_tokens(x, w, labels):
    """The backward pass mixes all tokens."""

    def bwd(saved, g):
        d = _saves_logits_bwd(saved, g)[0]
        return d - d.mean((0, 1)), None

    return _with(bwd)(x @ w, labels).mean()
