"""Language models and what is done with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.fields.layers import attend, causal, layer_norm, mlp
from tests.fields.registry import program


def _decoder(d):
    return d.normal(64, 32, scale=0.1), [
        (d.weight(32, 96), d.weight(32, 32), d.layers(32, 64, 32)) for _ in range(2)
    ]


def _logits(params, tokens):
    embed, blocks = params
    x = embed[tokens]
    for qkv, out, ff in blocks:
        x = x + attend(*jnp.split(layer_norm(x) @ qkv, 3, -1), causal(tokens.shape[1])) @ out
        x = x + mlp(ff, layer_norm(x), jax.nn.gelu)
    return layer_norm(x) @ embed.T


def _log_probabilities(params, tokens):
    logp = jax.nn.log_softmax(_logits(params, tokens[:, :-1]))
    return jnp.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0]


@program(lambda d: (_decoder(d), d.integers(64, 4, 33)), aux=True)
def causal_language_model(params, tokens):
    """Tied embeddings, cross entropy with a penalty of the partition function; perplexity."""
    logits = _logits(params, tokens[:, :-1])
    z = jax.nn.logsumexp(logits, -1)
    logp = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0] - z
    return -logp.mean() + 1e-4 * (z**2).mean(), {"perplexity": jnp.exp(-logp.mean()), "logp": logp}


@program(
    lambda d: ((d.weight(32, 96), d.layers(32, 32)), d.normal(2, 48, 32), d.normal(2, 48, 32)),
    aux=True,
)
def rotary_at_long_positions(params, x, target):
    """Rotary angles at positions near 100,000, as in the continuation of a long context."""
    qkv, head = params
    q, k, v = jnp.split(layer_norm(x) @ qkv, 3, -1)
    position = 100_000.0 + jnp.arange(48.0)
    angle = position[:, None] / 10_000.0 ** (jnp.arange(16) / 16)

    def rotate(x):
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate(
            [a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1
        )

    q, k = rotate(q), rotate(k)
    h = x + attend(q, k, v, causal(48))
    return jnp.mean((mlp(head, h) - target) ** 2), {"scores": q[:, -1] @ k.swapaxes(1, 2)[0]}


@program(
    lambda d: (
        (d.weight(32, 8), d.normal(8, 32, 48, scale=0.2), d.normal(8, 48, 32, scale=0.15)),
        d.normal(40, 32),
        d.normal(40, 32),
    ),
    aux=True,
)
def mixture_of_experts(params, x, target):
    """Two of eight experts for each token, dispatched by one-hot products; loads are balanced."""
    router, up, down = params
    p = jax.nn.softmax(layer_norm(x) @ router)
    weight, index = lax.top_k(p, 2)
    weight = weight / weight.sum(-1, keepdims=True)
    gates = (jax.nn.one_hot(index, 8) * weight[..., None]).sum(1)
    h = jax.nn.silu(jnp.einsum("td,edf->tef", x, up))
    out = jnp.einsum("tef,efd,te->td", h, down, gates)
    load = (gates > 0).mean(0)
    balance = 8 * (load * p.mean(0)).sum()
    return jnp.mean((x + out - target) ** 2) + 0.01 * balance, {"load": load, "index": index}


@program(
    lambda d: (
        {
            "in": d.weight(16, 64),
            "bc": d.weight(32, 17),
            "dt": d.normal(1, 32),
            "a": jnp.log(d.uniform(32, 8, low=1, high=8)),
            "out": d.weight(32, 16),
        },
        d.normal(3, 40, 16),
        d.normal(3, 40, 16),
    )
)
def selective_scan(params, x, target):
    """A selective state space model; states decay by an input-dependent exponential."""
    u, gate = jnp.split(layer_norm(x) @ params["in"], 2, -1)
    u = jax.nn.silu(u)
    bcd = u @ params["bc"]
    b, c, dt = bcd[..., :8], bcd[..., 8:16], jax.nn.softplus(bcd[..., 16:] @ params["dt"] - 2.0)
    decay = jnp.exp(-dt[..., None] * jnp.exp(params["a"]))
    drive = (dt * u)[..., None] * b[..., None, :]

    def step(h, inputs):
        a, bu, c = inputs
        h = a * h + bu
        return h, (h * c[:, None]).sum(-1)

    t = lambda v: v.swapaxes(0, 1)
    _, y = lax.scan(step, jnp.zeros((3, 32, 8)), (t(decay), t(drive), t(c)))
    out = x + (t(y) * jax.nn.silu(gate)) @ params["out"]
    return jnp.mean((out - target) ** 2)


@program(
    lambda d: (
        (d.weight(32, 96), d.normal(32, scale=0.3), d.layers(32, 16)),
        d.normal(3, 40, 32),
        d.normal(3, 40, 16),
    )
)
def linear_attention(params, x, target):
    """Weighted key-value averages with decay and a running maximum (RWKV)."""
    w, decay, head = params
    r, k, v = jnp.split(layer_norm(x) @ w, 3, -1)
    log_decay = -jnp.exp(decay)

    def step(carry, inputs):
        num, den, top = carry
        k, v = inputs
        new = jnp.maximum(top + log_decay, k)
        a, b = jnp.exp(top + log_decay - new), jnp.exp(k - new)
        num, den = a * num + b * v, a * den + b
        return (num, den, new), num / den

    zero = jnp.zeros((3, 32))
    _, y = lax.scan(step, (zero, zero, zero - 1e38), (k.swapaxes(0, 1), v.swapaxes(0, 1)))
    return jnp.mean((mlp(head, jax.nn.sigmoid(r) * y.swapaxes(0, 1)) - target) ** 2)


@program(
    lambda d: (_decoder(d), _decoder(d), d.integers(64, 16, 40), d.integers(64, 16, 40)), aux=True
)
def direct_preference(params, reference, chosen, rejected):
    """Sums of log-probabilities near -160, as differences of differences.

    The largest error of four pairs is chance: 5.4 times that of rounded products in one order here,
    1.3 times in the median of six points nearby. That of sixteen is not.
    """
    policy = _log_probabilities(params, chosen).sum(-1) - _log_probabilities(params, rejected).sum(
        -1
    )
    base = _log_probabilities(reference, chosen).sum(-1) - _log_probabilities(
        reference, rejected
    ).sum(-1)
    margin = 0.1 * (policy - lax.stop_gradient(base))
    return -jax.nn.log_sigmoid(margin).mean(), {"margin": margin, "policy": policy}


@program(
    lambda d: (_decoder(d), d.integers(64, 6, 24), d.normal(6, 23, scale=0.3) - 4.2, d.normal(6)),
    aux=True,
)
def group_relative_policy(params, tokens, old, rewards):
    """Token ratios of a policy, advantages within the group, an unbiased KL."""
    logp = _log_probabilities(params, tokens)
    adv = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    ratio = jnp.exp(logp - lax.stop_gradient(logp) + 0.01 * (lax.stop_gradient(logp) - old))
    gain = jnp.minimum(ratio * adv[:, None], jnp.clip(ratio, 0.8, 1.2) * adv[:, None])
    kl = jnp.exp(old - logp) - (old - logp) - 1
    return -(gain - 0.04 * kl).mean(), {"kl": kl.mean(), "ratio": ratio, "logp": logp}


@program(
    lambda d: (
        (d.normal(100, 32, scale=0.1), d.normal(100, 32, scale=0.1)),
        d.integers(100, 64),
        d.integers(100, 64),
        d.integers(100, 64, 5),
    )
)
def word_vectors(params, centre, context, negative):
    """Skip-grams with five negative samples."""
    a, b = params
    u = a[centre]
    good = (u * b[context]).sum(-1)
    bad = jnp.einsum("nd,nkd->nk", u, b[negative])
    return -(jax.nn.log_sigmoid(good) + jax.nn.log_sigmoid(-bad).sum(-1)).mean()


@program(
    lambda d: ((d.layers(16, 32, 5), d.normal(5, 5)), d.normal(6, 25, 16), d.integers(5, 6, 25)),
    aux=True,
)
def conditional_random_field(params, x, tags):
    """A chain: a path's score less the logarithm of all paths' sum."""
    net, transition = params
    unary = mlp(net, x, jnp.tanh)
    score = jnp.take_along_axis(unary, tags[..., None], -1)[..., 0].sum(-1)
    score += transition[tags[:, :-1], tags[:, 1:]].sum(-1)

    def step(alpha, u):
        return jax.nn.logsumexp(alpha[:, :, None] + transition, 1) + u, None

    alpha, _ = lax.scan(step, unary[:, 0], unary[:, 1:].swapaxes(0, 1))
    z = jax.nn.logsumexp(alpha, -1)
    return (z - score).mean() / 25, {"logp": score - z}


@program(
    lambda d: (
        (d.layers(32, 32, 24), d.layers(20, 32, 24), jnp.array([2.659], "f")),
        d.normal(32, 32),
        d.normal(32, 20),
    ),
    aux=True,
)
def image_text_contrast(params, images, texts):
    """Two encoders and a learned temperature as the exponential of a parameter."""
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    a, b = unit(mlp(params[0], images)), unit(mlp(params[1], texts))
    logits = jnp.exp(params[2]) * a @ b.T
    loss = -0.5 * (
        jnp.diag(jax.nn.log_softmax(logits, 0)) + jnp.diag(jax.nn.log_softmax(logits, 1))
    )
    return loss.mean(), {"logits": logits, "gap": ((a.mean(0) - b.mean(0)) ** 2).sum()}


@program(
    lambda d: (
        (d.weight(32, 32), d.weight(32, 32), d.layers(64, 1), d.layers(64, 50)),
        d.normal(4, 12, 32),
        d.normal(4, 20, 32),
        d.integers(50, 4, 20),
        d.integers(50, 4, 12),
    ),
    aux=True,
)
def pointer_generator(params, states, source, words, labels):
    """Words are copied or generated; the mixed probability's logarithm."""
    wq, wk, gate, head = params
    share = jax.nn.softmax((states @ wq) @ (source @ wk).swapaxes(1, 2) / jnp.sqrt(32.0))
    both = jnp.concatenate([states, share @ source], -1)
    p_gen = jax.nn.sigmoid(mlp(gate, both))
    copied = jnp.einsum("nts,nsv->ntv", share, jax.nn.one_hot(words, 50))
    p = p_gen * jax.nn.softmax(mlp(head, both)) + (1 - p_gen) * copied
    at = jnp.take_along_axis(p, labels[..., None], -1)
    return -jnp.log(at + 1e-9).mean(), {"p_gen": p_gen}


@program(
    lambda d: (
        (d.weight(32, 96), d.normal(4, 32, scale=0.5), d.layers(32, 20)),
        d.normal(3, 24, 32),
        d.integers(20, 3, 24),
    )
)
def relative_bias_attention(params, x, labels):
    """Logarithmic buckets of distances give a bias to each head."""
    qkv, table, head = params
    off = np.abs(np.arange(24)[:, None] - np.arange(24)[None])
    bucket = np.where(
        off < 16, off, np.minimum(16 + (np.log(np.maximum(off, 1) / 16) * 8).astype(int), 31)
    )
    q, k, v = (t.reshape(3, 24, 4, 8).swapaxes(1, 2) for t in jnp.split(layer_norm(x) @ qkv, 3, -1))
    logits = q @ k.swapaxes(2, 3) + table[:, bucket]
    h = (jax.nn.softmax(logits) @ v).swapaxes(1, 2).reshape(3, 24, 32)
    logp = jax.nn.log_softmax(mlp(head, layer_norm(x + h)))
    return -jnp.take_along_axis(logp, labels[..., None], -1).mean()
