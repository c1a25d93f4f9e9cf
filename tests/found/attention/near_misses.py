"""Programs that look like attention. A fused kernel computes none of them as it stands.

Those of `NEAR_MISSES` must be left alone: somebody reads what a kernel does not return, or the
weights are no softmax over what is summed. Those of `EXTRA_TERMS` are attention and something more,
which may be replaced where that something is handled exactly.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jaxamp
from tests.found.attention.corpus import (
    EXTRA_TERMS,
    NEAR_MISSES,
    SCALE,
    B,
    H,
    N,
    T,
    btnh,
    cross,
    made,
    one_head,
    present,
    pv,
    qk,
    tril,
    written,
)

near_miss = partial(written, NEAR_MISSES, count=0)
extra = partial(written, EXTRA_TERMS)


def _weights(q: Array, k: Array) -> Array:
    return jax.nn.softmax(qk(q, k))


# Weights and scores that are read elsewhere.


@near_miss(btnh)
def weights_returned(q: Array, k: Array, v: Array) -> Any:
    """To be looked at."""
    weights = _weights(q, k)
    return pv(weights, v), weights


@near_miss(lambda d: (*btnh(d), d.normal(B, T, N, 4), d.normal(B, T, N, 4)))
def scores_of_two_products(q: Array, k: Array, v: Array, q2: Array, k2: Array) -> Array:
    """Of the words, and of where they are: kernels read one pair of queries and keys."""
    return pv(jax.nn.softmax(qk(q, k) + qk(q2, k2)), v)


@near_miss(btnh)
def mean_weights_returned(q: Array, k: Array, v: Array) -> Any:
    """Their mean over heads."""
    weights = _weights(q, k)
    return pv(weights, v), weights.mean(1)


@near_miss(btnh)
def entropy_of_weights(q: Array, k: Array, v: Array) -> Any:
    """A regulariser."""
    weights = _weights(q, k)
    return pv(weights, v), -jnp.sum(weights * jnp.log(weights + 1e-9), -1).mean()


@near_miss(btnh)
def squares_of_weights(q: Array, k: Array, v: Array) -> Any:
    """Another regulariser."""
    weights = _weights(q, k)
    return pv(weights, v), jnp.sum(weights**2)


@near_miss(btnh)
def coverage(q: Array, k: Array, v: Array) -> Any:
    """How much each key was read: weights summed over queries."""
    weights = _weights(q, k)
    return pv(weights, v), weights.sum(-2)


@near_miss(btnh)
def largest_weight(q: Array, k: Array, v: Array) -> Any:
    """How much the key is read that is read most."""
    weights = _weights(q, k)
    return pv(weights, v), weights.max(-1)


@extra(btnh)
def scores_returned(q: Array, k: Array, v: Array) -> Any:
    """Logits of a second loss."""
    scores = qk(q, k)
    return pv(jax.nn.softmax(scores), v), scores


@extra(btnh)
def scores_of_the_layer_before(q: Array, k: Array, v: Array) -> Array:
    """Residual attention: the scores of one layer are added to those of the next."""
    first = qk(q, k)
    x = pv(jax.nn.softmax(first), v)
    return pv(jax.nn.softmax(qk(x, k) + first), v)


@extra(btnh)
def attention_both_ways(q: Array, k: Array, v: Array) -> Any:
    """One array of scores, a softmax over each of its axes."""
    scores = qk(q, k)
    there = pv(jax.nn.softmax(scores, -1), v)
    back = jnp.einsum("bhqk,bqhd->bkhd", jax.nn.softmax(scores, -2), q)
    return there, back


@made(NEAR_MISSES, "flax", count=0)
def sown_weights() -> Any:
    """Flax's own word for weights that are read elsewhere."""
    from flax import linen as nn

    module = nn.MultiHeadDotProductAttention(N)
    x = np.sin(np.arange(B * T * N * H, dtype=np.float32)).reshape(B, T, N * H)
    params = module.init(jax.random.key(0), x)

    def run(params: Any, x: Any) -> Any:
        return module.apply(params, x, sow_weights=True, mutable=["intermediates"])

    return run, (params, x)


# Something between the softmax and the values.


@near_miss(btnh)
def dropout(q: Array, k: Array, v: Array) -> Array:
    """From the program's own key."""
    weights = _weights(q, k)
    keep = jax.random.bernoulli(jax.random.key(3), 0.9, weights.shape)
    return pv(jnp.where(keep, weights / 0.9, 0.0), v)


@near_miss(btnh)
def dropout_of_flax(q: Array, k: Array, v: Array) -> Array:
    """By its own word."""
    from flax import linen as nn

    key = jax.random.key(3)
    return nn.dot_product_attention(q, k, v, dropout_rng=key, dropout_rate=0.1, deterministic=False)


@near_miss(lambda d: (*btnh(d), d.uniform(B, N, T, T)))
def gated_weights(q: Array, k: Array, v: Array, gate: Array) -> Array:
    """A gate for each pair."""
    return pv(_weights(q, k) * gate, v)


@near_miss(btnh)
def squared_weights(q: Array, k: Array, v: Array) -> Array:
    """Sharpened, and not normalised again."""
    return pv(_weights(q, k) ** 2, v)


@near_miss(btnh)
def root_of_weights(q: Array, k: Array, v: Array) -> Array:
    """Flattened."""
    return pv(jnp.sqrt(_weights(q, k)), v)


@near_miss(btnh)
def double_softmax(q: Array, k: Array, v: Array) -> Array:
    """The softmax of a softmax."""
    return pv(jax.nn.softmax(_weights(q, k)), v)


@near_miss(btnh)
def weights_masked_after(q: Array, k: Array, v: Array) -> Array:
    """Causal after the softmax, not normalised again."""
    return pv(jnp.where(tril(), _weights(q, k), 0.0), v)


@near_miss(btnh)
def weights_with_a_threshold(q: Array, k: Array, v: Array) -> Array:
    """Small weights are dropped."""
    weights = _weights(q, k)
    return pv(jnp.where(weights > 0.03, weights, 0.0), v)


@near_miss(btnh)
def straight_through(q: Array, k: Array, v: Array) -> Array:
    """The largest key alone, the derivative of all."""
    weights = _weights(q, k)
    hard = jax.nn.one_hot(jnp.argmax(weights, -1), T)
    return pv(weights + lax.stop_gradient(hard - weights), v)


@near_miss(lambda d: (*btnh(d), d.weight(N, N)))
def heads_that_talk_after(q: Array, k: Array, v: Array, mix: Array) -> Array:
    """Weights are mixed over heads."""
    return pv(jnp.einsum("bhqk,hn->bnqk", _weights(q, k), mix), v)


@extra(lambda d: (*btnh(d), d.weight(T, T)))
def weights_mixed_over_keys(q: Array, k: Array, v: Array, mix: Array) -> Array:
    """A product over keys before the values."""
    return pv(_weights(q, k) @ mix, v)


@near_miss(btnh)
def uniform_part(q: Array, k: Array, v: Array) -> Array:
    """Weights and a tenth of a mean, rescaled entry by entry."""
    weights = _weights(q, k)
    return pv(weights / (weights + 0.1), v)


@near_miss(btnh)
def cumulative_weights(q: Array, k: Array, v: Array) -> Array:
    """Summed up along the keys."""
    return pv(jnp.cumsum(_weights(q, k), -1), v)


@near_miss(lambda d: (*btnh(d), d.uniform(1, 1, 1, T)))
def keys_weighted_after(q: Array, k: Array, v: Array, gate: Array) -> Array:
    """A gate for each key, inside of the powers."""
    return pv(jnp.tanh(_weights(q, k) * gate), v)


# No softmax over what is summed.


@near_miss(btnh)
def softmax_over_queries(q: Array, k: Array, v: Array) -> Array:
    """The wrong axis."""
    return pv(jax.nn.softmax(qk(q, k), axis=-2), v)


@near_miss(btnh)
def softmax_over_heads(q: Array, k: Array, v: Array) -> Array:
    """Heads compete."""
    return pv(jax.nn.softmax(qk(q, k), axis=1), v)


@near_miss(btnh)
def softmax_over_heads_and_keys(q: Array, k: Array, v: Array) -> Array:
    """Over two axes, one of which is not summed."""
    return pv(jax.nn.softmax(qk(q, k), axis=(1, 3)), v)


@near_miss(btnh)
def softmax_over_examples(q: Array, k: Array, v: Array) -> Array:
    """Over the first axis."""
    return pv(jax.nn.softmax(qk(q, k), axis=0), v)


@near_miss(btnh)
def values_of_queries(q: Array, k: Array, v: Array) -> Array:
    """A softmax over keys, a sum over queries."""
    return jnp.einsum("bhqk,bqhd->bkhd", _weights(q, k), v)


@near_miss(btnh)
def slots(q: Array, k: Array, v: Array) -> Array:
    """Slot attention: over queries, then normalised over keys."""
    weights = jax.nn.softmax(qk(q, k), axis=-2) + 1e-8
    return pv(weights / weights.sum(-1, keepdims=True), v)


@near_miss(btnh)
def sigmoids(q: Array, k: Array, v: Array) -> Array:
    """Each weight for itself."""
    return pv(jax.nn.sigmoid(qk(q, k)), v)


@near_miss(btnh)
def sigmoids_normalised(q: Array, k: Array, v: Array) -> Array:
    """And divided by their sum."""
    weights = jax.nn.sigmoid(qk(q, k))
    return pv(weights / weights.sum(-1, keepdims=True), v)


@near_miss(btnh)
def rectified(q: Array, k: Array, v: Array) -> Array:
    """Positive scores by their sum."""
    weights = jax.nn.relu(qk(q, k))
    return pv(weights / (weights.sum(-1, keepdims=True) + 1e-3), v)


@near_miss(btnh)
def squared_scores(q: Array, k: Array, v: Array) -> Array:
    """Squares of rectified scores, as in Primer."""
    return pv(jnp.square(jax.nn.relu(qk(q, k))) / T, v)


@near_miss(btnh)
def exponentials_alone(q: Array, k: Array, v: Array) -> Array:
    """Not normalised."""
    return pv(jnp.exp(qk(q, k)), v)


@near_miss(btnh)
def divided_by_the_root(q: Array, k: Array, v: Array) -> Array:
    """Exponentials by their norm, not by their sum."""
    e = jnp.exp(qk(q, k))
    return pv(e / jnp.sqrt(jnp.sum(e * e, -1, keepdims=True)), v)


@near_miss(btnh)
def divided_by_the_largest(q: Array, k: Array, v: Array) -> Array:
    """Exponentials by their maximum."""
    e = jnp.exp(qk(q, k))
    return pv(e / e.max(-1, keepdims=True), v)


@near_miss(btnh)
def sum_of_other_exponentials(q: Array, k: Array, v: Array) -> Array:
    """The sum is that of half the scores."""
    s = qk(q, k)
    return pv(jnp.exp(s) / jnp.exp(0.5 * s).sum(-1, keepdims=True), v)


@near_miss(btnh)
def linear_attention(q: Array, k: Array, v: Array) -> Array:
    """Without scores of pairs."""
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    memory = jnp.einsum("bkhd,bkhe->bhde", k, v)
    return jnp.einsum("bqhd,bhde->bqhe", q, memory)


@near_miss(btnh)
def efficient_attention(q: Array, k: Array, v: Array) -> Array:
    """A softmax of each operand (Shen et al. 2018)."""
    memory = jnp.einsum("bkhd,bkhe->bhde", jax.nn.softmax(k, axis=1), v)
    return jnp.einsum("bqhd,bhde->bqhe", jax.nn.softmax(q, axis=-1), memory)


@near_miss(lambda d: (d.normal(B, T, H), d.normal(B, T, H), d.normal(B, T, H), d.normal(H)))
def additive_scores(q: Array, k: Array, v: Array, w: Array) -> Array:
    """Bahdanau's: no product of queries and keys."""
    scores = jnp.tanh(q[:, :, None] + k[:, None]) @ w
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v)


@near_miss(lambda d: (d.normal(B, T, H), d.weight(H, 4), d.normal(4, H, H, scale=H**-0.5)))
def mixture_of_experts(x: Array, router: Array, experts: Array) -> Array:
    """A softmax over experts, each of which has its own value for each word."""
    made = jnp.einsum("btd,edf->btef", x, experts)
    return jnp.einsum("bte,btef->btf", jax.nn.softmax(x @ router), made)


@near_miss(btnh)
def stick_breaking(q: Array, k: Array, v: Array) -> Array:
    """Weights by products of sigmoids."""
    s = jnp.where(tril(), qk(q, k), -30.0)
    rest = jnp.cumsum(jax.nn.log_sigmoid(-s), -1)
    return pv(jnp.exp(jax.nn.log_sigmoid(s) + rest), v)


@near_miss(btnh)
def sparse_weights(q: Array, k: Array, v: Array) -> Array:
    """Sparsemax, by sorting."""
    s = qk(q, k)
    ordered = -jnp.sort(-s, -1)
    sums = jnp.cumsum(ordered, -1) - 1
    count = jnp.sum(ordered > sums / jnp.arange(1, T + 1), -1, keepdims=True)
    top = jnp.take_along_axis(sums, count - 1, -1) / count
    return pv(jax.nn.relu(s - top), v)


# Scores that are more than a product.


@near_miss(lambda d: (*btnh(d), d.weight(N, N)))
def heads_that_talk_before(q: Array, k: Array, v: Array, mix: Array) -> Array:
    """Scores are mixed over heads."""
    scores = jnp.einsum("bhqk,hn->bnqk", qk(q, k), mix)
    return pv(jax.nn.softmax(scores), v)


@near_miss(btnh)
def top_scores_alone(q: Array, k: Array, v: Array) -> Array:
    """A mask that the scores themselves make."""
    scores = qk(q, k)
    least = lax.top_k(scores, 5)[0][..., -1:]
    return pv(jax.nn.softmax(jnp.where(scores < least, -jnp.inf, scores)), v)


@near_miss(btnh)
def scores_normalised(q: Array, k: Array, v: Array) -> Array:
    """Of unit variance in each row."""
    s = qk(q, k)
    return pv(jax.nn.softmax(s * lax.rsqrt(s.var(-1, keepdims=True) + 1e-6)), v)


# Biases of numbers that all keys of a row share: a gradient in 16 bits would be lost.


@near_miss(lambda d: (*btnh(d), d.normal(N)))
def learnt_slopes(q: Array, k: Array, v: Array, slopes: Array) -> Array:
    """ALiBi with a slope for each head that is trained."""
    past = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T)[None])
    return pv(jax.nn.softmax(qk(q, k) - slopes[:, None, None] * past), v)


@near_miss(lambda d: (*btnh(d), d.normal(N), d.normal(N)))
def logarithmic_distance(q: Array, k: Array, v: Array, width: Array, rate: Array) -> Array:
    """Both numbers of KERPLE's kernel (Chi et al. 2022) are trained."""
    past = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T)[None])
    width, rate = (jax.nn.softplus(x)[:, None, None] for x in (width, rate))
    return pv(jax.nn.softmax(qk(q, k) - width * jnp.log1p(rate * past)), v)


@near_miss(lambda d: (*btnh(d), d.normal(2 * T - 1, N), d.normal(B, N, T)))
def gated_relative_positions(q: Array, k: Array, v: Array, table: Array, gate: Array) -> Array:
    """Each query says how much positions count (WavLM)."""
    distance = jnp.arange(T)[:, None] - jnp.arange(T)[None] + T - 1
    bias = jax.nn.sigmoid(gate)[..., None] * table[distance].transpose(2, 0, 1)
    return pv(jax.nn.softmax(qk(q, k) + bias), v)


@near_miss(lambda d: (*btnh(d), d.normal(B, N, T)))
def forgetting(q: Array, k: Array, v: Array, gate: Array) -> Array:
    """A bias is what has been forgotten since a key (Lin et al. 2025)."""
    kept = jnp.cumsum(jax.nn.log_sigmoid(gate), -1)
    scores = qk(q, k) + (kept[..., :, None] - kept[..., None, :])
    return pv(jax.nn.softmax(jnp.where(tril(), scores, -jnp.inf)), v)


# What the user asked for.


@near_miss(btnh)
def highest_precision(q: Array, k: Array, v: Array) -> Array:
    """Products in float32, by JAX's own word."""
    words: dict[str, Any] = {"precision": lax.Precision.HIGHEST}
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, **words) * SCALE
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v, **words)


@near_miss(btnh)
def kept(q: Array, k: Array, v: Array) -> Array:
    """In float32 by jaxamp's word."""
    with jaxamp.keep_precision():
        return pv(_weights(q, k), v)


@near_miss(btnh)
def softmax_kept(q: Array, k: Array, v: Array) -> Array:
    """The softmax alone is float32 by jaxamp's word."""
    scores = qk(q, k)
    with jaxamp.keep_precision():
        weights = jax.nn.softmax(scores)
    return pv(weights, v)


@near_miss(lambda d: (d.integers(5, B, T, N, H), d.integers(5, B, T, N, H), d.normal(B, T, N, H)))
def integer_operands(q: Array, k: Array, v: Array) -> Array:
    """Products of integers are exact."""
    return pv(jax.nn.softmax(qk(q, k)), v)


@near_miss(btnh)
def complex_operands(q: Array, k: Array, v: Array) -> Array:
    """Products of complex numbers."""
    q, k = lax.complex(q, v), lax.complex(k, q)
    return pv(jax.nn.softmax(qk(q, k).real), v)


@near_miss(lambda d: tuple(d.normal(B, T, 1, 300, scale=0.3) for _ in range(3)))
def large_heads(q: Array, k: Array, v: Array) -> Array:
    """Heads of 300 numbers, for which there is no kernel."""
    return pv(_weights(q, k), v)


# Attention, and something more.


@extra(lambda d: (*btnh(d), np.float32(1.3)), count=1)
def learnt_temperature(q: Array, k: Array, v: Array, factor: Array) -> Array:
    """A scalar that is learnt."""
    return pv(jax.nn.softmax(qk(q, k) * factor), v)


@extra(lambda d: (*btnh(d), d.uniform(N, 1, 1, low=0.5, high=2.0)))
def temperature_of_heads(q: Array, k: Array, v: Array, factor: Array) -> Array:
    """One for each head, of unit queries and keys, as in the second Swin."""
    q, k = (x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6) for x in (q, k))
    return pv(jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * jnp.exp(factor)), v)


@extra(lambda d: (*btnh(d), d.uniform(B, 1, T, 1, low=0.5, high=2.0)))
def temperature_of_queries(q: Array, k: Array, v: Array, factor: Array) -> Array:
    """One for each query."""
    return pv(jax.nn.softmax(qk(q, k) * factor), v)


@extra(lambda d: (*btnh(d), d.uniform(B, 1, 1, T, low=0.5, high=2.0)))
def temperature_of_keys(q: Array, k: Array, v: Array, factor: Array) -> Array:
    """One for each key."""
    return pv(jax.nn.softmax(qk(q, k) * factor), v)


@extra(btnh)
def soft_cap(q: Array, k: Array, v: Array) -> Array:
    """Scores within ±5, as in Gemma."""
    return pv(jax.nn.softmax(5.0 * jnp.tanh(qk(q, k) / 5.0)), v)


@extra(btnh)
def clipped_scores(q: Array, k: Array, v: Array) -> Array:
    """A hard cap."""
    return pv(jax.nn.softmax(jnp.clip(qk(q, k), -1.0, 1.0)), v)


@extra(btnh)
def rectified_scores(q: Array, k: Array, v: Array) -> Array:
    """Negative scores are zero, before the softmax."""
    return pv(jax.nn.softmax(jax.nn.relu(qk(q, k))), v)


@extra(lambda d: (*btnh(d), d.normal(N)))
def sinks(q: Array, k: Array, v: Array, sink: Array) -> Array:
    """A learnt logit of nothing, as in gpt-oss."""
    scores = qk(q, k)
    column = jnp.broadcast_to(sink[:, None, None], (B, N, T, 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], -1))
    return pv(weights[..., :-1], v)


@extra(btnh)
def sum_and_one(q: Array, k: Array, v: Array) -> Array:
    """Weights that may all be small."""
    e = jnp.exp(qk(q, k))
    return pv(e / (1 + e.sum(-1, keepdims=True)), v)


@extra(btnh)
def sum_and_epsilon(q: Array, k: Array, v: Array) -> Array:
    """A small number against division by zero."""
    s = qk(q, k)
    e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    return pv(e / (e.sum(-1, keepdims=True) + 1e-6), v)


@extra(btnh)
def logsumexp_returned(q: Array, k: Array, v: Array) -> Any:
    """For a loss of its own."""
    s = qk(q, k)
    return pv(jax.nn.softmax(s), v), jax.nn.logsumexp(s, axis=-1)


@extra(btnh)
def maximum_returned(q: Array, k: Array, v: Array) -> Any:
    """The largest score of each row is read elsewhere."""
    s = qk(q, k)
    top = s.max(-1, keepdims=True)
    e = jnp.exp(s - top)
    return pv(e / e.sum(-1, keepdims=True), v), top


@extra(btnh)
def sum_with_its_maximum(q: Array, k: Array, v: Array) -> Any:
    """The sum of exponentials is read elsewhere."""
    s = qk(q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    total = e.sum(-1, keepdims=True)
    return pv(e / total, v), total


@extra(lambda d: (*btnh(d), d.uniform(B, T, N, 1)))
def gated_outputs(q: Array, k: Array, v: Array, gate: Array) -> Array:
    """A gate for each query, on the weights."""
    return pv(_weights(q, k) * gate.transpose(0, 2, 1, 3), v)


@extra(lambda d: (*btnh(d), d.normal(B, T, N, 16)))
def two_values(q: Array, k: Array, v: Array, other: Array) -> Any:
    """The same weights, two sets of values of different size."""
    weights = _weights(q, k)
    return pv(weights, v), pv(weights, other)


@extra(lambda d: (*btnh(d), d.normal(B, T, H)))
def values_with_and_without_heads(q: Array, k: Array, v: Array, shared: Array) -> Any:
    """The same weights, values of each head and values of all."""
    weights = _weights(q, k)
    return pv(weights, v), jnp.einsum("bhqk,bkd->bqhd", weights, shared)


@extra(lambda d: (*btnh(d), d.normal(B, T, N, H), d.normal(B, T, N, H)))
def difference_of_weights(q: Array, k: Array, v: Array, q2: Array, k2: Array) -> Array:
    """Differential attention."""
    return pv(_weights(q, k) - 0.5 * _weights(q2, k2), v)


@extra(btnh)
def softmax_twice_normalised(q: Array, k: Array, v: Array) -> Array:
    """Masked after the softmax, and normalised again."""
    weights = jnp.where(tril(), _weights(q, k), 0.0)
    return pv(weights / weights.sum(-1, keepdims=True), v)


@extra(btnh)
def weights_stopped(q: Array, k: Array, v: Array) -> Array:
    """No derivative of the weights."""
    return pv(lax.stop_gradient(_weights(q, k)), v)


@extra(btnh)
def scores_stopped(q: Array, k: Array, v: Array) -> Array:
    """Nor of the scores."""
    return pv(jax.nn.softmax(lax.stop_gradient(qk(q, k))), v)


@extra(btnh)
def keys_stopped(q: Array, k: Array, v: Array) -> Array:
    """Nor of the keys alone."""
    return pv(_weights(q, lax.stop_gradient(k)), v)


@extra(btnh)
def sum_stopped(q: Array, k: Array, v: Array) -> Array:
    """The sum has no derivative, the exponentials have."""
    s = qk(q, k)
    e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    return pv(e / lax.stop_gradient(e.sum(-1, keepdims=True)), v)


@extra(btnh)
def half_of_the_derivative(q: Array, k: Array, v: Array) -> Array:
    """A derivative of half the size, by a difference that is zero."""
    p = _weights(q, k)
    return pv(0.5 * p + lax.stop_gradient(0.5 * p), v)


@extra(btnh)
def maximum_of_one_side(q: Array, k: Array, v: Array) -> Array:
    """The maximum is stopped in the exponentials, and not where it is added again."""
    s = qk(q, k)
    top = s.max(-1, keepdims=True)
    e = jnp.exp(s - lax.stop_gradient(top))
    log = top + jnp.log(e.sum(-1, keepdims=True))
    return pv(jnp.exp(s - log), v)


@extra(btnh)
def own_clipped_derivative(q: Array, k: Array, v: Array) -> Array:
    """The scores' cotangent is clipped on its way."""

    @jax.custom_vjp
    def clipped(s: Array) -> Array:
        return s

    clipped.defvjp(lambda s: (s, None), lambda _, ct: (jnp.clip(ct, -0.01, 0.01),))
    return pv(jax.nn.softmax(clipped(qk(q, k))), v)


def _nothing_seen(d: Any) -> tuple[Any, ...]:
    mask = present(d)
    mask[1] = False
    return *btnh(d), mask


@extra(_nothing_seen)
def nothing_seen_finite(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """An example that sees nothing, with a finite mask: the mean of all values."""
    scores = jnp.where(mask[:, None, None], qk(q, k), -1e9)
    return pv(jax.nn.softmax(scores), v)


@extra(_nothing_seen)
def nothing_seen_infinite(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """The same with minus infinity: not a number."""
    scores = jnp.where(mask[:, None, None], qk(q, k), -jnp.inf)
    return pv(jax.nn.softmax(scores), v)


@extra(_nothing_seen)
def nothing_seen_added(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """The same with -10000 added: the scores themselves decide."""
    bias = jnp.where(mask, 0.0, -10000.0)[:, None, None]
    return pv(jax.nn.softmax(qk(q, k) + bias), v)


@extra(_nothing_seen)
def nothing_seen_added_low(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """The same with so low a number added that scores vanish next to it: the mean of all values."""
    bias = jnp.where(mask, 0.0, -1e30)[:, None, None]
    return pv(jax.nn.softmax(qk(q, k) + bias), v)


@extra(_nothing_seen)
def nothing_seen_causal(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Causal and masked: the mean of all values, those after a query's own too."""
    seen = tril() & mask[:, None, None]
    return pv(jax.nn.softmax(jnp.where(seen, qk(q, k), -1e9)), v)


@extra(_nothing_seen)
def nothing_seen_twice(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """The same, masked one after the other."""
    scores = jnp.where(tril(), qk(q, k), -1e9)
    return pv(jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e9)), v)


@extra(_nothing_seen)
def nothing_seen_no_maximum(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """No maximum is subtracted, so that there is nothing to divide by: not a number."""
    e = jnp.exp(jnp.where(mask[:, None, None], qk(q, k), -1e9))
    return pv(e / e.sum(-1, keepdims=True), v)


@extra(_nothing_seen)
def nothing_seen_zero(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """The same, and weights of zero."""
    seen = mask[:, None, None]
    weights = jax.nn.softmax(jnp.where(seen, qk(q, k), -1e30))
    return pv(jnp.where(seen, weights, 0.0), v)


@extra(_nothing_seen)
def nothing_seen_zero_and_mean(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Weights are masked again for one of two products: zero, and the mean of all values."""
    seen = mask[:, None, None]
    weights = jax.nn.softmax(jnp.where(seen, qk(q, k), -1e30))
    return pv(jnp.where(seen, weights, 0.0), v) + jnp.sin(pv(weights, v))


@extra(btnh)
def first_query_sees_nothing(q: Array, k: Array, v: Array) -> Array:
    """Strictly causal, with a finite mask."""
    mask = jnp.tril(jnp.ones((T, T), bool), -1)
    return pv(jax.nn.softmax(jnp.where(mask, qk(q, k), -1e9)), v)


@extra(btnh)
def weak_mask(q: Array, k: Array, v: Array) -> Array:
    """A mask that is but a small number: masked keys are still read."""
    return pv(jax.nn.softmax(jnp.where(tril(), qk(q, k), -2.0)), v)


@extra(btnh)
def weak_mask_added(q: Array, k: Array, v: Array) -> Array:
    """The same, added."""
    return pv(jax.nn.softmax(qk(q, k) + jnp.where(tril(), 0.0, -3.0)), v)


@extra(btnh)
def noise_on_scores(q: Array, k: Array, v: Array) -> Array:
    """Gumbel noise, from the program's own key."""
    scores = qk(q, k)
    return pv(jax.nn.softmax(scores + jax.random.gumbel(jax.random.key(1), scores.shape)), v)


@extra(btnh)
def keys_dropped(q: Array, k: Array, v: Array) -> Array:
    """Scores dropped before the softmax, from the program's own key."""
    scores = qk(q, k)
    keep = jax.random.bernoulli(jax.random.key(1), 0.9, scores.shape)
    return pv(jax.nn.softmax(jnp.where(keep, scores, -1e9)), v)


@extra(btnh)
def distances(q: Array, k: Array, v: Array) -> Array:
    """Minus half the squared distance: the keys' own squares are a bias."""
    squares = jnp.sum(k * k, -1).transpose(0, 2, 1)[:, :, None]
    own = jnp.sum(q * q, -1).transpose(0, 2, 1)[..., None]
    return pv(jax.nn.softmax(qk(q, k) - SCALE * 0.5 * (squares + own)), v)


@extra(lambda d: (*btnh(d), d.normal(T, N, H), d.normal(N, H), d.normal(N, H)))
def transformer_xl(q: Array, k: Array, v: Array, place: Array, u: Array, w: Array) -> Array:
    """A second product, of queries and relative places, is added."""
    moved = jnp.einsum("bqhd,khd->bhqk", q + w, place)
    moved = jnp.pad(moved, ((0, 0), (0, 0), (0, 0), (1, 0)))
    moved = moved.reshape(B, N, T + 1, T)[:, :, 1:]
    content = jnp.einsum("bqhd,bkhd->bhqk", q + u, k)
    scores = jnp.where(tril(), (content + moved) * SCALE, -jnp.inf)
    return pv(jax.nn.softmax(scores), v)


@extra(one_head)
def expected_embedding(x: Array, table: Array, _: Array) -> Array:
    """The mean of a table under its own logits."""
    return jax.nn.softmax(x @ table.T) @ table


@extra(lambda d: tuple(d.normal(B, 4, T // 4, N, H) for _ in range(3)))
def keys_of_two_axes(q: Array, k: Array, v: Array) -> Array:
    """Keys have two axes, as pixels have."""
    s = jnp.einsum("bxyhd,bzwhd->bhxyzw", q, k) * SCALE
    return jnp.einsum("bhxyzw,bzwhd->bxyhd", jax.nn.softmax(s, axis=(-2, -1)), v)


@extra(cross)
def forward_mode(q: Array, k: Array, v: Array) -> Any:
    """The derivative along a direction is part of the program."""

    def attend(q: Array) -> Array:
        return pv(_weights(q, k), v)

    return jax.jvp(attend, (q,), (jnp.cos(q),))


@extra(cross)
def derivative_of_a_derivative(q: Array, k: Array, v: Array) -> Array:
    """A gradient is part of the program, which is differentiated again."""
    return jax.grad(lambda q: jnp.sum(jnp.sin(pv(_weights(q, k), v))))(q)
