"""Programs in which logits are stored whatever is done, or nothing is gained.

They were written before anything was looked for in them.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.found.attention.corpus import Program, written
from tests.found.cross_entropy.ruled import by_logits
from tests.found.cross_entropy.spellings import B, D, T, V, batch, rows
from tests.programs.registry import Args, Draw

NEAR_MISSES: dict[str, Program] = {}

ALONG_EXAMPLES = ("smoothed_in_time", "cumulative_in_time", "shuffled_tokens", "ctc",
                  "centred_over_tokens", "sampled")  # fmt: skip
"""Programs that mix tokens of an example, or need another pass: they are computed exactly, too."""

near = partial(written, NEAR_MISSES, count=0, operands=False)
_ce = optax.softmax_cross_entropy_with_integer_labels


def few(d: Draw) -> Args:
    """Ten classes."""
    return d.normal(B * T, D), d.weight(D, 10), d.integers(10, B * T)


def taught(d: Draw) -> Args:
    """A batch and the logits of a teacher."""
    return *batch(d), d.normal(B, T, V)


@near(batch)
def logits_returned(x, w, labels):
    logits = x @ w
    return _ce(logits, labels).mean(), logits


@near(batch)
def log_probabilities_returned(x, w, labels):
    logp = jax.nn.log_softmax(x @ w)
    return -jnp.take_along_axis(logp, labels[..., None], -1).mean(), logp


@near(batch)
def probabilities_returned(x, w, labels):
    logits = x @ w
    return _ce(logits, labels).mean(), jax.nn.softmax(logits)


@near(batch)
def logits_of_the_last_example_returned(x, w, labels):
    logits = x @ w
    return _ce(logits, labels).mean(), logits[-1]


@near(batch)
def sampled(x, w, labels):
    logits = x @ w
    return _ce(logits, labels).mean(), jax.random.categorical(jax.random.key(0), logits)


@near(batch)
def gumbel(x, w, labels):
    noise = jax.random.gumbel(jax.random.key(0), (B, T, V))
    return _ce(x @ w + noise, labels).mean()


@near(batch)
def every_other_token(x, w, labels):
    return _ce((x @ w)[:, ::2], labels[:, ::2]).mean()


@near(batch)
def cut_across_examples(x, w, labels):
    logits = jnp.reshape(x @ w, (B * T, V))
    return _ce(logits[:-3], labels.reshape(-1)[3:]).mean()


@near(batch)
def dropped_logits(x, w, labels):
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, (B, T, V))
    return _ce(jnp.where(kept, x @ w, 0.0), labels).mean()


@near(taught)
def distilled(x, w, labels, teacher):
    return -(jax.nn.softmax(teacher) * jax.nn.log_softmax(x @ w)).sum(-1).mean()


@near(taught)
def soft_targets(x, w, labels, teacher):
    return optax.softmax_cross_entropy(x @ w, teacher).mean()


@near(lambda d: (*batch(d), d.normal(B, T, D), d.weight(D, V)))
def distilled_from_another_head(x, w, labels, y, other):
    """Two heads at once: the teacher's distribution is read whole."""
    target = jax.nn.softmax(y @ other)
    return -(target * jax.nn.log_softmax(x @ w)).sum(-1).mean()


@near(few)
def few_classes(x, w, labels):
    return _ce(x @ w, labels).mean()


@near(lambda d: (d.normal(B * T, 64), d.weight(64, 64), d.integers(64, B * T)))
def as_many_classes_as_features(x, w, labels):
    return _ce(x @ w, labels).mean()


@near(batch)
def softmax_over_tokens(x, w, labels):
    logits = x @ w
    logp = jax.nn.log_softmax(logits, axis=1)
    return -jnp.take_along_axis(logp, labels[..., None], -1).mean()


@near(rows)
def softmax_over_examples(x, w, labels):
    return -jax.nn.log_softmax(x @ w, axis=0)[jnp.arange(B * T), labels].mean()


@near(rows)
def softmax_over_everything(x, w, labels):
    logits = x @ w
    return (jax.nn.logsumexp(logits) - logits[jnp.arange(B * T), labels]).mean()


@near(rows)
def centred_over_tokens(x, w, labels):
    logits = x @ w
    return _ce(logits - logits.mean(0, keepdims=True), labels).mean()


@near(rows)
def batch_norm_of_logits(x, w, labels):
    logits = x @ w
    logits = (logits - logits.mean(0)) * lax.rsqrt(logits.var(0) + 1e-5)
    return _ce(logits, labels).mean()


@near(rows)
def clip_contrastive(x, w, labels):
    """Rows and columns of one product, as CLIP has them."""
    del labels
    y = w.T[: B * T]
    scores = x @ y.T
    same = jnp.arange(B * T)
    return _ce(scores, same).mean() + _ce(scores.T, same).mean()


@near(rows)
def sigmoids(x, w, labels):
    targets = jax.nn.one_hot(labels, V)
    return optax.sigmoid_binary_cross_entropy(x @ w, targets).mean()


@near(rows)
def squared_error(x, w, labels):
    return jnp.square(x @ w - jax.nn.one_hot(labels, V)).mean()


@near(rows)
def hinge(x, w, labels):
    logits = x @ w
    right = jnp.take_along_axis(logits, labels[:, None], 1)
    return jnp.maximum(0.0, 1 + logits - right).sum(-1).mean()


@near(rows)
def only_argmax(x, w, labels):
    return ((x @ w).argmax(-1) == labels).mean(dtype=jnp.float32) * x.sum()


@near(rows)
def hidden_layer(x, w, labels):
    h = jax.nn.softmax(x @ w) @ jnp.sin(w.T)
    return _ce(h, labels % D).mean()


@near(lambda d: (d.normal(T, D), d.normal(V, D), d.normal(V, D)))
def attention(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


@near(rows)
def soft_embedding(x, w, labels):
    """Weights that embed the mean of a distribution again."""
    logits = x @ w
    again = jax.nn.softmax(logits) @ jnp.cos(w).T
    return _ce(logits, labels).mean() + again.sum()


@near(rows)
def logits_mixed(x, w, labels):
    logits = x @ w
    return _ce(logits @ jnp.eye(V, V, 1), labels).mean()


@near(batch)
def smoothed_in_time(x, w, labels):
    logits = x @ w
    return _ce(0.5 * logits[:, 1:] + 0.5 * logits[:, :-1], labels[:, 1:]).mean()


@near(batch)
def cumulative_in_time(x, w, labels):
    return _ce(jnp.cumsum(x @ w, axis=1), labels).mean()


@near(batch)
def shuffled_tokens(x, w, labels):
    order = jax.random.permutation(jax.random.key(1), T)
    return _ce((x @ w)[:, order], labels).mean()


@near(batch)
def ctc(x, w, labels):
    zeros = jnp.zeros((B, T), jnp.float32)
    return optax.ctc_loss(x @ w, zeros, labels[:, :4] + 1, zeros[:, :4]).mean()


@near(batch)
def in_a_loop(x, w, labels):
    logits, labels = x @ w, jnp.asarray(labels)

    def step(i, total):
        return total + _ce(logits[:, i], labels[:, i]).sum()

    return lax.fori_loop(0, 3, step, 0.0)


@near(batch)
def printed(x, w, labels):
    logits = x @ w
    jax.debug.callback(lambda _: None, logits)
    return _ce(logits, labels).mean()


@near(lambda d: (d.normal(B, T, V), d.integers(V, B, T)))
def logits_are_arguments(logits, labels):
    return _ce(logits, labels).mean()


@near(lambda d: (d.integers(D, B, T), d.weight(D, V), d.integers(V, B, T)))
def logits_are_looked_up(words, table, labels):
    return _ce(table[words], labels).mean()


@near(lambda d: (d.normal(4, T, D), d.normal(4, D, V), d.integers(V, 4, T)))
def a_head_for_each_example(x, w, labels):
    return _ce(jnp.einsum("btd,bdv->btv", x, w), labels).mean()


@near(lambda d: (d.normal(B, T, D), np.abs(d.weight(D, V)), d.integers(V, B, T)))
def no_exponentials(x, w, labels):
    p = jnp.square(x @ w)
    p = p / p.sum(-1, keepdims=True)
    return -jnp.log(jnp.take_along_axis(p, labels[..., None], -1)).mean()


@near(batch)
def ruled_logits_returned(x, w, labels):
    logits = x @ w
    return by_logits(logits, labels).mean(), logits


@near(batch)
def rule_that_returns_probabilities(x, w, labels):
    both = jax.custom_vjp(
        lambda logits, labels: (by_logits(logits, labels), jax.nn.softmax(logits))
    )
    both.defvjp(lambda *given: (both(*given), None), lambda _, g: (g[1], None))
    return both(x @ w, labels)
