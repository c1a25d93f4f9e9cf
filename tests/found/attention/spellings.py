"""Softmax attention as it is written in libraries, in tutorials, and by people with own habits.

Each function is one way to write what a fused kernel computes. None was written with a matcher in
mind; what is not found is listed in `tests/found/attention/not_found.py`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from tests.found.attention.corpus import (
    SCALE,
    SPELLINGS,
    B,
    H,
    K,
    N,
    T,
    bnth,
    btnh,
    cross,
    grouped,
    lengths,
    one_head,
    present,
    pv,
    qk,
    tril,
    written,
)

spelling = partial(written, SPELLINGS)

# As JAX writes it.


@spelling(btnh)
def jax_nn(q: Array, k: Array, v: Array) -> Array:
    """`jax.nn.dot_product_attention`."""
    return jax.nn.dot_product_attention(q, k, v)


@spelling(btnh)
def jax_nn_causal(q: Array, k: Array, v: Array) -> Array:
    """Causal by its own word."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@spelling(lambda d: (*btnh(d), d.normal(1, N, T, T)))
def jax_nn_bias(q: Array, k: Array, v: Array, bias: Array) -> Array:
    """A bias for each head, which is learnt."""
    return jax.nn.dot_product_attention(q, k, v, bias=bias)


@spelling(lambda d: (*btnh(d), d.mask(B, 1, T, T) | np.eye(T, dtype=bool)))
def jax_nn_mask(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """A mask that is not known at trace time."""
    return jax.nn.dot_product_attention(q, k, v, mask=mask)


@spelling(btnh)
def jax_nn_window(q: Array, k: Array, v: Array) -> Array:
    """A sliding window to the left."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(7, 0))


@spelling(btnh)
def jax_nn_window_both_sides(q: Array, k: Array, v: Array) -> Array:
    """A window around each word."""
    return jax.nn.dot_product_attention(q, k, v, local_window_size=(4, 4))


@spelling(grouped)
def jax_nn_grouped(q: Array, k: Array, v: Array) -> Array:
    """Two queries for each key head."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@spelling(lambda d: (d.normal(B, T, N, H), d.normal(B, T, 1, H), d.normal(B, T, 1, H)))
def jax_nn_one_key_head(q: Array, k: Array, v: Array) -> Array:
    """All queries read one key head."""
    return jax.nn.dot_product_attention(q, k, v)


@spelling(lambda d: (*btnh(d), lengths(d)))
def jax_nn_lengths(q: Array, k: Array, v: Array, length: Array) -> Array:
    """Padding by the number of keys."""
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=length)


@spelling(lambda d: (*btnh(d), lengths(d)))
def jax_nn_lengths_causal(q: Array, k: Array, v: Array, length: Array) -> Array:
    """Padding and causal."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, key_value_seq_lengths=length)


@spelling(btnh)
def jax_nn_scale(q: Array, k: Array, v: Array) -> Array:
    """Another scale."""
    return jax.nn.dot_product_attention(q, k, v, scale=0.25)


@spelling(lambda d: tuple(d.normal(T, N, H) for _ in range(3)))
def jax_nn_one_example(q: Array, k: Array, v: Array) -> Array:
    """Without an axis of examples."""
    return jax.nn.dot_product_attention(q, k, v)


@spelling(cross)
def jax_nn_cross(q: Array, k: Array, v: Array) -> Array:
    """Keys of another sequence."""
    return jax.nn.dot_product_attention(q, k, v)


# The axes.


@spelling(btnh)
def einsum_words_first(q: Array, k: Array, v: Array) -> Array:
    """As in most tutorials."""
    return pv(jax.nn.softmax(qk(q, k)), v)


@spelling(bnth)
def matmul_heads_first(q: Array, k: Array, v: Array) -> Array:
    """As torch's users write it."""
    return jax.nn.softmax(q @ jnp.swapaxes(k, -2, -1) / math.sqrt(H), axis=-1) @ v


@spelling(btnh)
def heads_last(q: Array, k: Array, v: Array) -> Array:
    """Scores with the heads as their last axis."""
    scores = jnp.einsum("btnh,bsnh->btsn", q, k) * SCALE
    return jnp.einsum("btsn,bsnh->btnh", jax.nn.softmax(scores, axis=2), v)


@spelling(lambda d: (d.normal(B, N, T, H), d.normal(B, N, H, T), d.normal(B, N, T, H)))
def keys_transposed(q: Array, k: Array, v: Array) -> Array:
    """Keys with words last."""
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(jnp.matmul(q, k) * SCALE), v)


@spelling(btnh)
def scores_transposed(q: Array, k: Array, v: Array) -> Array:
    """Keys are the rows of the scores, and the softmax is over them."""
    scores = jnp.einsum("bkhd,bqhd->bhkq", k, q) * SCALE
    return jnp.einsum("bhkq,bkhd->bqhd", jax.nn.softmax(scores, axis=-2), v)


@spelling(one_head)
def matrices(q: Array, k: Array, v: Array) -> Array:
    """One head of one example."""
    return jax.nn.softmax(q @ k.T / jnp.sqrt(H)) @ v


@spelling(lambda d: tuple(d.normal(N, T, H) for _ in range(3)))
def heads_of_one_example(q: Array, k: Array, v: Array) -> Array:
    """Three axes, the first of heads or examples."""
    weights = jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", q, k) * SCALE, axis=-1)
    return jnp.einsum("hqk,hkd->hqd", weights, v)


@spelling(lambda d: tuple(d.normal(T, B, N, H) for _ in range(3)))
def time_major(q: Array, k: Array, v: Array) -> Array:
    """Words first."""
    weights = jax.nn.softmax(jnp.einsum("tbhd,sbhd->bhts", q, k) * SCALE)
    return jnp.einsum("bhts,sbhd->tbhd", weights, v)


@spelling(lambda d: tuple(d.normal(B, 3, N, T, H) for _ in range(3)))
def two_axes_of_examples(q: Array, k: Array, v: Array) -> Array:
    """As windows of images have."""
    weights = jax.nn.softmax(jnp.einsum("bwhqd,bwhkd->bwhqk", q, k) * SCALE)
    return jnp.einsum("bwhqk,bwhkd->bwhqd", weights, v)


@spelling(bnth)
def dot_general(q: Array, k: Array, v: Array) -> Array:
    """With JAX's own primitive."""
    scores = lax.dot_general(q, k, (((3,), (3,)), ((0, 1), (0, 1)))) * SCALE
    return lax.dot_general(jax.nn.softmax(scores), v, (((3,), (2,)), ((0, 1), (0, 1))))


@spelling(one_head)
def tensordot(q: Array, k: Array, v: Array) -> Array:
    """With numpy's word."""
    weights = jax.nn.softmax(jnp.tensordot(q, k, axes=(1, 1)) * SCALE)
    return jnp.tensordot(weights, v, axes=(1, 0))


@spelling(bnth)
def batches_merged(q: Array, k: Array, v: Array) -> Array:
    """Examples and heads as one axis, as for torch.bmm."""
    q, k, v = (x.reshape(B * N, T, H) for x in (q, k, v))
    weights = jax.nn.softmax(q @ k.transpose(0, 2, 1) * SCALE, -1)
    return (weights @ v).reshape(B, N, T, H)


@spelling(lambda d: (*btnh(d), d.normal(N, H, 16, scale=0.2)))
def projected_in_the_product(q: Array, k: Array, v: Array, out: Array) -> Array:
    """The projection of the output in one einsum with the values."""
    return jnp.einsum("bhqk,bkhd,hdm->bqm", jax.nn.softmax(qk(q, k)), v, out)


@spelling(lambda d: (d.normal(B, T, N * H), d.weight(N * H, 3 * N * H), d.weight(N * H, N * H)))
def from_one_projection(x: Array, qkv: Array, out: Array) -> Array:
    """A whole layer: one projection, split."""
    q, k, v = (y.reshape(B, T, N, H) for y in jnp.split(x @ qkv, 3, axis=-1))
    return pv(jax.nn.softmax(qk(q, k)), v).reshape(B, T, N * H) @ out


@spelling(lambda d: (d.normal(B, T, N * H), d.weight(N * H, 3 * N * H)))
def from_a_stacked_projection(x: Array, qkv: Array) -> Array:
    """One projection with an axis of three."""
    q, k, v = (x @ qkv).reshape(B, T, 3, N, H).transpose(2, 0, 3, 1, 4)
    out = jax.nn.softmax(q @ k.mT * SCALE, axis=-1) @ v
    return out.transpose(0, 2, 1, 3).reshape(B, T, N * H)


@spelling(lambda d: (d.normal(B, T, N, H), d.normal(B, T, N, H), d.normal(B, T, N, 16)))
def wider_values(q: Array, k: Array, v: Array) -> Array:
    """Values of another size than keys."""
    return pv(jax.nn.softmax(qk(q, k)), v)


# The scale.


@spelling(btnh)
def scale_on_queries(q: Array, k: Array, v: Array) -> Array:
    """Before the product."""
    return pv(jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q * SCALE, k)), v)


@spelling(btnh)
def scale_on_keys(q: Array, k: Array, v: Array) -> Array:
    """On the other operand."""
    return pv(jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k / np.sqrt(H))), v)


@spelling(btnh)
def scale_on_both(q: Array, k: Array, v: Array) -> Array:
    """Half of it on each operand."""
    q, k = q * H**-0.25, k * H**-0.25
    return pv(jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)


@spelling(btnh)
def scale_by_a_root_of_jax(q: Array, k: Array, v: Array) -> Array:
    """A root that JAX computes."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(jnp.float32(H))
    return pv(jax.nn.softmax(scores), v)


@spelling(btnh)
def scale_by_rsqrt(q: Array, k: Array, v: Array) -> Array:
    """A reciprocal root, of an array."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * lax.rsqrt(jnp.asarray(H, jnp.float32))
    return pv(jax.nn.softmax(scores), v)


@spelling(btnh)
def scale_after_the_mask(q: Array, k: Array, v: Array) -> Array:
    """Masked, then scaled."""
    scores = jnp.where(tril(), jnp.einsum("bqhd,bkhd->bhqk", q, k), -jnp.inf)
    return pv(jax.nn.softmax(scores * SCALE), v)


@spelling(lambda d: (d.normal(B, T, N, H, scale=SCALE), d.normal(B, T, N, H), d.normal(B, T, N, H)))
def no_scale(q: Array, k: Array, v: Array) -> Array:
    """As in T5."""
    return pv(jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)


@spelling(btnh)
def scale_and_temperature(q: Array, k: Array, v: Array) -> Array:
    """Two factors, one after the other."""
    return pv(jax.nn.softmax(qk(q, k) / 1.5), v)


# Masks.


@spelling(btnh)
def tril_and_minus_1e9(q: Array, k: Array, v: Array) -> Array:
    """A large number in the masked places."""
    return pv(jax.nn.softmax(jnp.where(tril(), qk(q, k), -1e9)), v)


@spelling(btnh)
def tril_and_minus_inf(q: Array, k: Array, v: Array) -> Array:
    """Minus infinity."""
    return pv(jax.nn.softmax(jnp.where(tril(), qk(q, k), -jnp.inf)), v)


@spelling(btnh)
def tril_and_finfo_min(q: Array, k: Array, v: Array) -> Array:
    """The smallest float32."""
    least = jnp.finfo(jnp.float32).min
    return pv(jax.nn.softmax(jnp.where(tril(), qk(q, k), least)), v)


@spelling(btnh)
def tril_in_floats(q: Array, k: Array, v: Array) -> Array:
    """A mask of ones and zeros, compared with zero, as in nanoGPT."""
    mask = jnp.tril(jnp.ones((T, T))).reshape(1, 1, T, T)
    return pv(jax.nn.softmax(jnp.where(mask == 0, -jnp.inf, qk(q, k)), axis=-1), v)


@spelling(btnh)
def added_large_numbers(q: Array, k: Array, v: Array) -> Array:
    """`(1 - mask) * -1e9`."""
    mask = jnp.tril(jnp.ones((T, T)))
    return pv(jax.nn.softmax(qk(q, k) + (1.0 - mask) * -1e9), v)


@spelling(btnh)
def added_triu_of_minus_inf(q: Array, k: Array, v: Array) -> Array:
    """An upper triangle of minus infinity, added."""
    return pv(jax.nn.softmax(qk(q, k) + jnp.triu(jnp.full((T, T), -jnp.inf), 1)), v)


@spelling(btnh)
def iota_compared(q: Array, k: Array, v: Array) -> Array:
    """Two iotas of the shape of scores."""
    scores = qk(q, k)
    row, column = (lax.broadcasted_iota(jnp.int32, scores.shape, i) for i in (2, 3))
    return pv(jax.nn.softmax(jnp.where(row >= column, scores, -1e30)), v)


@spelling(btnh)
def arange_compared(q: Array, k: Array, v: Array) -> Array:
    """Two ranges, one of them a column."""
    words = jnp.arange(T)
    scores = jnp.where(words[:, None] < words[None, :], -1e9, qk(q, k))
    return pv(jax.nn.softmax(scores), v)


@spelling(btnh)
def constant_of_numpy(q: Array, k: Array, v: Array) -> Array:
    """A mask that numpy made."""
    mask = np.tril(np.ones((1, 1, T, T), bool))
    return pv(jax.nn.softmax(jnp.where(mask, qk(q, k), np.float32(-1e9))), v)


@spelling(btnh)
def vmapped_comparison(q: Array, k: Array, v: Array) -> Array:
    """A mask by `jax.vmap` of a predicate, twice."""
    words = jnp.arange(T)
    mask = jax.vmap(lambda i: jax.vmap(lambda j: j <= i)(words))(words)
    return pv(jax.nn.softmax(jnp.where(mask, qk(q, k), -jnp.inf)), v)


@spelling(btnh)
def select_of_lax(q: Array, k: Array, v: Array) -> Array:
    """JAX's own primitive, of two whole arrays."""
    scores = qk(q, k)
    mask = jnp.broadcast_to(tril(), scores.shape)
    return pv(jax.nn.softmax(lax.select(mask, scores, jnp.full_like(scores, -1e9))), v)


@spelling(btnh)
def multiplied_mask(q: Array, k: Array, v: Array) -> Array:
    """`s * m - 1e10 * (1 - m)`, as in the first GPT-2."""
    mask = jnp.tril(jnp.ones((T, T)))
    return pv(jax.nn.softmax(qk(q, k) * mask - 1e10 * (1 - mask)), v)


@spelling(lambda d: (*btnh(d), lengths(d)))
def padding_by_lengths(q: Array, k: Array, v: Array, length: Array) -> Array:
    """Keys before each example's length."""
    mask = jnp.arange(T)[None] < length[:, None]
    return pv(jax.nn.softmax(jnp.where(mask[:, None, None], qk(q, k), -jnp.inf)), v)


@spelling(lambda d: (*btnh(d), present(d)))
def padding_mask(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Which keys are there, as an argument."""
    scores = jnp.where(mask[:, None, None, :], qk(q, k), -1e9)
    return pv(jax.nn.softmax(scores), v)


@spelling(lambda d: (*btnh(d), present(d).astype(np.float32)))
def padding_added(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """As in BERT: ones and zeros become a bias."""
    bias = (1.0 - mask)[:, None, None, :] * -10000.0
    return pv(jax.nn.softmax(qk(q, k) + lax.stop_gradient(bias)), v)


@spelling(lambda d: (*btnh(d), present(d)))
def causal_and_padding(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Both, joined by `and`."""
    seen = tril()[None, None] & mask[:, None, None, :]
    return pv(jax.nn.softmax(jnp.where(seen, qk(q, k), -1e9)), v)


@spelling(lambda d: (*btnh(d), present(d)))
def causal_then_padding(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Both, one after the other."""
    scores = jnp.where(tril(), qk(q, k), -1e9)
    return pv(jax.nn.softmax(jnp.where(mask[:, None, None, :], scores, -1e9)), v)


@spelling(lambda d: (*btnh(d), np.sort(d.integers(4, B, T), axis=1)))
def segments(q: Array, k: Array, v: Array, segment: Array) -> Array:
    """Packed sequences, causal inside of each."""
    same = segment[:, :, None] == segment[:, None, :]
    scores = jnp.where((same & tril())[:, None], qk(q, k), -jnp.inf)
    return pv(jax.nn.softmax(scores), v)


# Segments that are known when a program is traced.

IN_FOUR = np.arange(T) // (T // 4)
UNEQUAL = np.repeat([0, 1, 2], [5, T - 12, 7])


def masked(q: Array, k: Array, v: Array, seen: Any) -> Array:
    """Attention to what is seen, bool[T, T]."""
    return pv(jax.nn.softmax(jnp.where(seen, qk(q, k), -jnp.inf)), v)


@spelling(btnh)
def segments_of_numbers(q: Array, k: Array, v: Array) -> Array:
    """A query sees the keys with its own number."""
    number = jnp.arange(T) // (T // 4)
    return masked(q, k, v, number[:, None] == number[None, :])


@spelling(btnh)
def segments_in_blocks(q: Array, k: Array, v: Array) -> Array:
    """Blocks of ones, added where they are not."""
    ones = [jnp.ones((n, n)) for n in np.bincount(UNEQUAL)]
    seen = jax.scipy.linalg.block_diag(*ones)
    return pv(jax.nn.softmax(qk(q, k) + (1.0 - seen) * -1e9), v)


@spelling(btnh)
def segments_by_kronecker(q: Array, k: Array, v: Array) -> Array:
    """A Kronecker product that NumPy has computed, of which a triangle is left."""
    seen = np.tril(np.kron(np.eye(4), np.ones((T // 4, T // 4))))
    return jax.nn.dot_product_attention(
        q, k, v, bias=jnp.asarray(np.where(seen, 0.0, -1e30))[None, None]
    )


@spelling(btnh)
def segments_mixed(q: Array, k: Array, v: Array) -> Array:
    """Two speakers in turn, causal."""
    number = np.arange(T) % 2
    return masked(q, k, v, jnp.tril(jnp.asarray(number[:, None] == number)))


@spelling(btnh)
def segments_with_windows(q: Array, k: Array, v: Array) -> Array:
    """Three masks, one after the other."""
    past = jnp.arange(T)[:, None] - jnp.arange(T)
    scores = jnp.where(past >= 0, qk(q, k), -1e9)
    scores = jnp.where(UNEQUAL[:, None] == UNEQUAL, scores, -1e9)
    return pv(jax.nn.softmax(jnp.where(past < 4, scores, -1e9)), v)


@spelling(cross)
def segments_of_fewer_keys(q: Array, k: Array, v: Array) -> Array:
    """Of other sizes for queries and keys."""
    return masked(q, k, v, IN_FOUR[:, None] == IN_FOUR[::2])


@spelling(lambda d: (*btnh(d), d.normal(N, 2 * T)))
def segments_with_bias(q: Array, k: Array, v: Array, table: Array) -> Array:
    """A bias for each head and distance, which is learnt."""
    scores = qk(q, k) + table[:, jnp.arange(T)[:, None] - jnp.arange(T) + T]
    return pv(jax.nn.softmax(jnp.where(IN_FOUR[:, None] == IN_FOUR, scores, -jnp.inf)), v)


@spelling(btnh)
def segments_with_padding(q: Array, k: Array, v: Array) -> Array:
    """The last words are of no segment: they see nothing, and their weights are equal."""
    here = np.arange(T) < T - 3
    seen = (IN_FOUR[:, None] == IN_FOUR) & here[:, None] & here
    return pv(jax.nn.softmax(jnp.where(seen, qk(q, k), -1e9)), v)


@spelling(btnh)
def window_to_both_sides(q: Array, k: Array, v: Array) -> Array:
    """A query sees its neighbours before and after."""
    return masked(q, k, v, jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T)) < 4)


@spelling(btnh)
def sliding_window(q: Array, k: Array, v: Array) -> Array:
    """The last words alone."""
    past = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    scores = jnp.where((past >= 0) & (past < 8), qk(q, k), -jnp.inf)
    return pv(jax.nn.softmax(scores), v)


@spelling(btnh)
def window_of_two_triangles(q: Array, k: Array, v: Array) -> Array:
    """A lower triangle without a lower one."""
    mask = jnp.tril(jnp.ones((T, T), bool)) & ~jnp.tril(jnp.ones((T, T), bool), -8)
    return pv(jax.nn.softmax(jnp.where(mask, qk(q, k), -1e9)), v)


@spelling(btnh)
def prefix_and_causal(q: Array, k: Array, v: Array) -> Array:
    """A prefix that all see, then causal."""
    mask = tril() | (jnp.arange(T) < 5)[None]
    return pv(jax.nn.softmax(jnp.where(mask, qk(q, k), -1e9)), v)


@spelling(lambda d: (d.normal(B, T // 2, N, H), d.normal(B, T, N, H), d.normal(B, T, N, H)))
def causal_at_the_end(q: Array, k: Array, v: Array) -> Array:
    """Queries are the last words of the keys."""
    mask = jnp.arange(T)[None] <= jnp.arange(T // 2)[:, None] + T // 2
    return pv(jax.nn.softmax(jnp.where(mask, qk(q, k), -jnp.inf)), v)


@spelling(lambda d: (*btnh(d), d.mask(B, T, T) | np.eye(T, dtype=bool)))
def mask_of_examples(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Each example has its own."""
    return pv(jax.nn.softmax(jnp.where(mask[:, None], qk(q, k), -jnp.inf)), v)


@spelling(lambda d: (*btnh(d), present(d)))
def softmax_with_where(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """The mask is a word of `jax.nn.softmax`."""
    return pv(jax.nn.softmax(qk(q, k), where=mask[:, None, None, :]), v)


@spelling(lambda d: (*btnh(d), present(d)))
def weights_masked_again(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Zeros where they are already, against whole rows of nothing."""
    seen = mask[:, None, None, :]
    weights = jax.nn.softmax(jnp.where(seen, qk(q, k), -1e30))
    return pv(jnp.where(seen, weights, 0.0), v)


@spelling(lambda d: (*btnh(d), present(d)))
def weights_times_mask(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """The same as a product."""
    seen = mask[:, None, None, :]
    return pv(jax.nn.softmax(jnp.where(seen, qk(q, k), -1e9)) * seen, v)


@spelling(lambda d: (d.normal(B, 4, T // 4, N * H), d.normal(N * H, 3 * N * H)), operands=False)
def pixels(x: Array, w: Array) -> Array:
    """Of an image, whose rows and columns are one axis of words between."""
    words = (x.reshape(B, T, N * H) @ w).reshape(B, T, N, 3 * H)
    q, k, v = jnp.split(words, 3, -1)
    return x + pv(jax.nn.softmax(qk(q, k)), v).reshape(x.shape)


@spelling(lambda d: (d.normal(B, 4, T // 4, N * H), d.normal(N * H, 3 * N * H)), operands=False)
def windows_of_pixels(x: Array, w: Array) -> Array:
    """Of an image, whose rows are cut in two: a half of a row attends to itself."""
    half = T // 8
    words = (x @ w).reshape(B, 4, 2, half, 3, N, H).reshape(B * 8, half, 3, N, H)
    q, k, v = jnp.moveaxis(words, 2, 0)
    return x + pv(jax.nn.softmax(qk(q, k)), v).reshape(x.shape)


@spelling(lambda d: (d.normal(B, 4, T // 4, N * H), d.normal(N * H, 3 * N * H)), operands=False)
def pixels_normalized_late(x: Array, w: Array) -> Array:
    """Divided by the sums of rows where words are rows and columns again."""
    q, k, v = jnp.split((x @ w).reshape(B, T, N, 3 * H), 3, -1)
    scores = qk(q, k)
    e = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    image = (B, 4, T // 4, N, -1)
    total = jnp.swapaxes(e.sum(-1), 1, 2)
    return x + (pv(e, v).reshape(image) / total.reshape(image)).reshape(x.shape)


# Biases.


@spelling(btnh)
def linear_biases(q: Array, k: Array, v: Array) -> Array:
    """ALiBi, causal."""
    slopes = 2.0 ** -jnp.arange(1.0, N + 1)
    past = jnp.arange(T)[None] - jnp.arange(T)[:, None]
    scores = qk(q, k) + slopes[:, None, None] * past
    return pv(jax.nn.softmax(jnp.where(past <= 0, scores, -jnp.inf)), v)


@spelling(lambda d: (*btnh(d), d.normal(2 * T - 1, N)))
def relative_positions(q: Array, k: Array, v: Array, table: Array) -> Array:
    """A learnt number for each distance and head."""
    distance = jnp.arange(T)[:, None] - jnp.arange(T)[None] + T - 1
    bias = table[distance].transpose(2, 0, 1)
    return pv(jax.nn.softmax(qk(q, k) + bias), v)


@spelling(lambda d: (*btnh(d), d.normal(B, T, T, 6), d.normal(6, N)))
def projected_pairs(q: Array, k: Array, v: Array, pairs: Array, w: Array) -> Array:
    """A bias of features of each pair of words, whose weights all keys share."""
    return pv(jax.nn.softmax(qk(q, k) + jnp.moveaxis(pairs @ w, -1, 1)), v)


@spelling(lambda d: (*btnh(d), d.normal(T, T, H)))
def relative_keys(q: Array, k: Array, v: Array, places: Array) -> Array:
    """A vector for each pair of words is added to the keys (Shaw et al. 2018)."""
    scores = qk(q, k) + jnp.einsum("bqhd,qkd->bhqk", q, places) * SCALE
    return pv(jax.nn.softmax(scores), v)


@spelling(lambda d: (*btnh(d), present(d).astype(np.float32)))
def real_mask_of_pairs(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """A real mask of words, for queries and for keys."""
    seen = mask[:, None, :, None] * mask[:, None, None, :]
    return pv(jax.nn.softmax(qk(q, k) + (1.0 - seen) * -1e9), v)


@spelling(lambda d: (*btnh(d), d.normal(B, N, T, T)))
def pair_bias(q: Array, k: Array, v: Array, bias: Array) -> Array:
    """A bias for each example and head, as of pairs in protein models."""
    return pv(jax.nn.softmax(qk(q, k) + bias), v)


@spelling(lambda d: (*btnh(d), d.normal(N, T, T), d.mask(B, 1, T, T) | np.eye(T, dtype=bool)))
def windows_of_images(q: Array, k: Array, v: Array, bias: Array, mask: Array) -> Array:
    """As in Swin: a learnt bias and an added mask."""
    shifted = jnp.where(mask, 0.0, -100.0)
    return pv(jax.nn.softmax(qk(q, k) + bias[None] + shifted, axis=-1), v)


# The softmax.


@spelling(btnh)
def by_hand(q: Array, k: Array, v: Array) -> Array:
    """Exponentials and their sum; the maximum is no part of the derivative."""
    s = qk(q, k)
    e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    return pv(e / e.sum(-1, keepdims=True), v)


@spelling(btnh)
def by_hand_through_the_maximum(q: Array, k: Array, v: Array) -> Array:
    """The maximum is not stopped."""
    s = jnp.where(tril(), qk(q, k), -1e9)
    e = jnp.exp(s - jnp.max(s, axis=-1, keepdims=True))
    return pv(e / jnp.sum(e, axis=-1, keepdims=True), v)


@spelling(btnh)
def without_a_maximum(q: Array, k: Array, v: Array) -> Array:
    """Nothing is subtracted."""
    e = jnp.exp(qk(q, k))
    return pv(e / e.sum(-1, keepdims=True), v)


@spelling(btnh)
def by_logsumexp(q: Array, k: Array, v: Array) -> Array:
    """The exponential of the difference to the logarithm of the sum."""
    s = qk(q, k)
    return pv(jnp.exp(s - jax.nn.logsumexp(s, axis=-1, keepdims=True)), v)


@spelling(btnh)
def by_log_softmax(q: Array, k: Array, v: Array) -> Array:
    """The exponential of its logarithm."""
    return pv(jnp.exp(jax.nn.log_softmax(qk(q, k))), v)


@spelling(btnh)
def normalised_at_the_end(q: Array, k: Array, v: Array) -> Array:
    """Divided by the sum after the product with the values."""
    s = jnp.where(tril(), qk(q, k), -jnp.inf)
    e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    total = jnp.einsum("bhqk->bqh", e)[..., None]
    return pv(e, v) / total


@spelling(btnh)
def by_a_reciprocal(q: Array, k: Array, v: Array) -> Array:
    """Multiplied by the reciprocal of the sum."""
    s = qk(q, k)
    e = jnp.exp(s - s.max(axis=-1)[..., None])
    return pv(e * (1.0 / e.sum(axis=-1))[..., None], v)


@spelling(btnh)
def powers_of_two(q: Array, k: Array, v: Array) -> Array:
    """`exp2`, the scale times log2(e), as kernels do."""
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (SCALE * math.log2(math.e))
    e = jnp.exp2(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    return pv(e / e.sum(-1, keepdims=True), v)


@spelling(lambda d: (*btnh(d), present(d)))
def safe_softmax(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """A maximum that is never infinite, a sum that is never zero."""
    s = jnp.where(mask[:, None, None], qk(q, k), -jnp.inf)
    top = lax.stop_gradient(s.max(-1, keepdims=True))
    e = jnp.exp(s - jnp.where(jnp.isfinite(top), top, 0.0))
    total = e.sum(-1, keepdims=True)
    return pv(e / jnp.where(total > 0, total, 1.0), v)


@spelling(btnh)
def softmax_in_float32(q: Array, k: Array, v: Array) -> Array:
    """Casts that a float32 program need not have."""
    weights = jax.nn.softmax(qk(q, k).astype(jnp.float32), axis=-1)
    return pv(weights.astype(q.dtype), v)


@spelling(btnh)
def products_in_bfloat16(q: Array, k: Array, v: Array) -> Array:
    """Somebody has lowered the products already; the softmax is float32."""
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * SCALE
    weights = jax.nn.softmax(scores).astype(jnp.bfloat16)
    return pv(weights, v).astype(jnp.float32)


@spelling(btnh)
def accumulated_in_float32(q: Array, k: Array, v: Array) -> Array:
    """Operands in bfloat16, scores as float32 accumulators, as in MaxText."""
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    words: dict[str, Any] = {"preferred_element_type": jnp.float32}
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, **words) * SCALE
    weights = jax.nn.softmax(jnp.where(tril(), scores, -jnp.inf)).astype(jnp.bfloat16)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v, **words)


@jax.custom_vjp
def _own_softmax(s: Array) -> Array:
    return jax.nn.softmax(s)


def _own_forward(s: Array) -> tuple[Array, Array]:
    p = jax.nn.softmax(s)
    return p, p


def _own_backward(p: Array, ct: Array) -> tuple[Array]:
    return (p * (ct - jnp.sum(p * ct, axis=-1, keepdims=True)),)


_own_softmax.defvjp(_own_forward, _own_backward)


@spelling(btnh)
def softmax_with_its_own_rule(q: Array, k: Array, v: Array) -> Array:
    """A derivative by hand, the usual one."""
    return pv(_own_softmax(qk(q, k)), v)


# Grouped queries.


@spelling(grouped)
def keys_repeated(q: Array, k: Array, v: Array) -> Array:
    """`jnp.repeat`."""
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    return pv(jax.nn.softmax(jnp.where(tril(), qk(q, k), -jnp.inf)), v)


@spelling(grouped)
def keys_broadcast(q: Array, k: Array, v: Array) -> Array:
    """`broadcast_to` and `reshape`, as in Llama."""
    k, v = (
        jnp.broadcast_to(x[:, :, :, None], (B, T, K, N // K, H)).reshape(B, T, N, H) for x in (k, v)
    )
    return pv(jax.nn.softmax(qk(q, k)), v)


@spelling(grouped)
def queries_reshaped(q: Array, k: Array, v: Array) -> Array:
    """An axis of groups in the queries."""
    q = q.reshape(B, T, K, N // K, H)
    weights = jax.nn.softmax(jnp.einsum("bqkgd,bskd->bkgqs", q, k) * SCALE)
    return jnp.einsum("bkgqs,bskd->bqkgd", weights, v).reshape(B, T, N, H)


@spelling(lambda d: (d.normal(B, T, N, H), d.normal(B, T, H), d.normal(B, T, H)))
def one_key_head(q: Array, k: Array, v: Array) -> Array:
    """Keys and values without an axis of heads."""
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkd->bhqk", q, k) * SCALE)
    return jnp.einsum("bhqk,bkd->bqhd", weights, v)


@spelling(grouped)
def keys_indexed(q: Array, k: Array, v: Array) -> Array:
    """The key head of each query head is looked up."""
    heads = np.arange(N) // (N // K)
    k, v = k[:, :, heads], v[:, :, heads]
    return pv(jax.nn.softmax(qk(q, k)), v)


# Cross attention, and more than one.


@spelling(cross)
def cross_attention(q: Array, k: Array, v: Array) -> Array:
    """Keys of a shorter sequence."""
    return pv(jax.nn.softmax(qk(q, k)), v)


@spelling(lambda d: (d.normal(B, T, N, H), d.normal(B, T // 2, N, H)))
def memory_is_keys_and_values(q: Array, memory: Array) -> Array:
    """Keys and values are one array."""
    return pv(jax.nn.softmax(qk(q, memory)), memory)


@spelling(lambda d: (d.normal(B, T, N, H),))
def all_three_are_one(x: Array) -> Array:
    """Queries, keys and values are one array."""
    return pv(jax.nn.softmax(qk(x, x)), x)


@spelling(btnh)
def squared_output(q: Array, k: Array, v: Array) -> Array:
    """The cotangent of the output is a multiple of the output."""
    return pv(jax.nn.softmax(qk(q, k)), v) ** 2


@spelling(btnh, count=2)
def queries_from_another(q: Array, k: Array, v: Array) -> Array:
    """With nothing in between."""
    return pv(jax.nn.softmax(qk(pv(jax.nn.softmax(qk(q, k)), v), v)), k)


@spelling(lambda d: (*btnh(d), d.normal(B, T // 2, N, H)), count=2)
def self_then_cross(q: Array, k: Array, v: Array, memory: Array) -> Array:
    """As in a decoder's layer."""
    own = jnp.where(tril(), qk(q, k), -1e9)
    x = q + pv(jax.nn.softmax(own), v)
    return x + pv(jax.nn.softmax(qk(x, memory)), memory)


@spelling(btnh, count=2)
def two_of_the_same_keys(q: Array, k: Array, v: Array) -> Array:
    """Two sequences of queries read one memory."""
    first, second = (pv(jax.nn.softmax(qk(x, k)), v) for x in (q, jnp.cos(q)))
    return first * second


def _rotated(x: Array) -> Array:
    angle = jnp.arange(T)[:, None, None] * 10.0 ** -jnp.arange(H // 2)
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


@spelling(btnh)
def rotary_positions(q: Array, k: Array, v: Array) -> Array:
    """Queries and keys are turned."""
    scores = jnp.where(tril(), qk(_rotated(q), _rotated(k)), -jnp.inf)
    return pv(jax.nn.softmax(scores), v)


@spelling(lambda d: (*btnh(d), d.uniform(H, low=0.5), d.uniform(H, low=0.5)))
def normalised_queries(q: Array, k: Array, v: Array, a: Array, b: Array) -> Array:
    """Queries and keys have unit mean squares, times a learnt vector."""

    def norm(x: Array, scale: Array) -> Array:
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    return pv(jax.nn.softmax(qk(norm(q, a), norm(k, b))), v)


# Inside of transforms and loops.


def _layer(x: Array, weights: tuple[Array, Array], seen: Array | None = None) -> Array:
    qkv, out = weights
    q, k, v = (y.reshape(B, T, N, H) for y in jnp.split(x @ qkv, 3, axis=-1))
    seen = tril() if seen is None else tril() & seen
    scores = jnp.where(seen, qk(q, k), jnp.finfo(jnp.float32).min)
    return x + pv(jax.nn.softmax(scores), v).reshape(B, T, N * H) @ out


def _stack(d: Any) -> tuple[Any, ...]:
    width = N * H
    scale = width**-0.5
    qkv, out = (d.normal(3, width, n * width, scale=scale) for n in (3, 1))
    return d.normal(B, T, width), (qkv, out)


layers = partial(spelling, _stack, operands=False)


@layers(count=3)
def layers_written_out(x: Array, weights: Any) -> Array:
    """A loop of Python."""
    for i in range(3):
        x = _layer(x, jax.tree.map(lambda w, i=i: w[i], weights))
    return x


@layers(count=1)
def layers_scanned(x: Array, weights: Any) -> Array:
    """A scan over layers."""
    return lax.scan(lambda x, w: (_layer(x, w), None), x, weights)[0]


@layers(count=1)
def segments_of_layers(x: Array, weights: Any) -> Array:
    """A mask of known numbers for all layers of a scan."""
    seen = jnp.asarray(IN_FOUR[:, None] == IN_FOUR)
    return lax.scan(lambda x, w: (_layer(x, w, seen), None), x, weights)[0]


@layers(count=1)
def layers_scanned_with_checkpoint(x: Array, weights: Any) -> Array:
    """Each layer is computed again going backward."""
    step = jax.checkpoint(_layer)
    return lax.scan(lambda x, w: (step(x, w), None), x, weights)[0]


@layers(count=1)
def layers_scanned_with_saved_products(x: Array, weights: Any) -> Array:
    """Products are kept, and nothing else."""
    policy = jax.checkpoint_policies.dots_saveable
    step = jax.checkpoint(_layer, policy=policy)
    return lax.scan(lambda x, w: (step(x, w), None), x, weights)[0]


@layers(count=1)
def layers_scanned_with_saved_projections(x: Array, weights: Any) -> Array:
    """Products without batch axes are kept: those with weights."""
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    step = jax.checkpoint(_layer, policy=policy, prevent_cse=False)
    return lax.scan(lambda x, w: (step(x, w), None), x, weights)[0]


@layers(count=1)
def layers_scanned_with_unrolling(x: Array, weights: Any) -> Array:
    """A scan that knows how often it is written out."""
    return lax.scan(lambda x, w: (_layer(x, w), None), x, weights, unroll=3)[0]


@layers(count=3)
def layers_jitted(x: Array, weights: Any) -> Array:
    """One function, jitted, called three times."""
    step = jax.jit(_layer)
    for i in range(3):
        x = step(x, jax.tree.map(lambda w, i=i: w[i], weights))
    return x


@layers(count=3)
def layers_with_checkpoint(x: Array, weights: Any) -> Array:
    """Written out, each with a checkpoint."""
    step = jax.checkpoint(_layer)
    for i in range(3):
        x = step(x, jax.tree.map(lambda w, i=i: w[i], weights))
    return x


@spelling(btnh)
def checkpoint_of_attention(q: Array, k: Array, v: Array) -> Array:
    """The attention alone has a checkpoint."""
    return jax.checkpoint(lambda q, k, v: pv(jax.nn.softmax(qk(q, k)), v))(q, k, v)


@spelling(btnh)
def checkpoint_of_weights(q: Array, k: Array, v: Array) -> Array:
    """The weights alone are computed again."""
    return pv(jax.checkpoint(lambda q, k: jax.nn.softmax(qk(q, k)))(q, k), v)


@spelling(btnh)
def named_for_checkpoint(q: Array, k: Array, v: Array) -> Array:
    """The output has a name, and a policy keeps it."""

    def attend(q: Array, k: Array, v: Array) -> Array:
        return checkpoint_name(pv(jax.nn.softmax(qk(q, k)), v), "context")

    policy = jax.checkpoint_policies.save_only_these_names("context")
    return jnp.sin(jax.checkpoint(attend, policy=policy)(q, k, v))


@spelling(btnh)
def functions_jitted(q: Array, k: Array, v: Array) -> Array:
    """Each part is a jitted function of its own."""
    return jax.jit(pv)(jax.jit(jax.nn.softmax)(jax.jit(qk)(q, k)), v)


@spelling(bnth)
def vmapped_twice(q: Array, k: Array, v: Array) -> Array:
    """One head of one example, under two vmaps."""

    def one(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.softmax(q @ k.T * SCALE) @ v

    return jax.vmap(jax.vmap(one))(q, k, v)


@spelling(btnh)
def vmapped_over_heads(q: Array, k: Array, v: Array) -> Array:
    """Examples written out, heads under a vmap in the middle."""

    def one(q: Array, k: Array, v: Array) -> Array:
        scores = jnp.einsum("bqd,bkd->bqk", q, k) * SCALE
        return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.where(tril(), scores, -1e9)), v)

    return jax.vmap(one, in_axes=2, out_axes=2)(q, k, v)


@spelling(grouped)
def vmapped_over_queries_of_a_group(q: Array, k: Array, v: Array) -> Array:
    """Queries of a group under a vmap that does not reach keys."""

    def one(q: Array) -> Array:
        return pv(jax.nn.softmax(qk(q, k)), v)

    return jax.vmap(one, in_axes=3, out_axes=3)(q.reshape(B, T, K, N // K, H))


@spelling(btnh)
def queries_in_chunks(q: Array, k: Array, v: Array) -> Array:
    """A loop over parts of the queries, each of which reads all keys."""
    parts = q.reshape(B, 2, T // 2, N, H).swapaxes(0, 1)
    out = lax.map(lambda part: pv(jax.nn.softmax(qk(part, k)), v), parts)
    return out.swapaxes(0, 1).reshape(B, T, N, H)


@spelling(btnh)
def under_a_name(q: Array, k: Array, v: Array) -> Array:
    """In a named scope."""
    with jax.named_scope("attention"):
        return pv(jax.nn.softmax(qk(q, k)), v)


@spelling(btnh)
def shard_mapped(q: Array, k: Array, v: Array) -> Array:
    """Each device has examples of its own."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:B]), ("data",))
    spec = jax.sharding.PartitionSpec("data")

    def attend(q: Array, k: Array, v: Array) -> Array:
        return pv(jax.nn.softmax(jnp.where(tril(), qk(q, k), -jnp.inf)), v)

    return jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)(q, k, v)


@spelling(btnh)
def values_of_one_branch(q: Array, k: Array, v: Array) -> Array:
    """In a branch of a condition."""

    def attend(q: Array, k: Array, v: Array) -> Array:
        return pv(jax.nn.softmax(qk(q, k)), v)

    return lax.cond(q[0, 0, 0, 0] < 1e6, attend, lambda q, k, v: q + k + v, q, k, v)
