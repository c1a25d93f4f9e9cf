"""A causal language model with haiku's own ``MultiHeadAttention``, as in haiku's example."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.deviceless.models import fused
from benchmarks.deviceless.models.fused import FUSED
from benchmarks.deviceless.models.heads import chunked, losses
from benchmarks.deviceless.models.model import (
    HAND,
    Config,
    Model,
    Size,
    chain_of_tokens,
)

LOW = jnp.bfloat16


FULL = Config(layers=4, width=1024, heads=16, length=1024, batch=4, vocabulary=8192)
SMALL = Config(layers=2, width=64, heads=4, length=32, batch=16, vocabulary=128)


@cache  # haiku is imported where its model is asked for: not everybody has it
def _modules() -> Any:
    import haiku as hk

    class Fused(hk.MultiHeadAttention):
        """The same parameters, with the kernel of the chip."""

        def __call__(self, query: Any, key: Any, value: Any, mask: Any = None) -> jax.Array:
            project: Any = self._linear_projection
            q = project(query, self.key_size, "query")
            k = project(key, self.key_size, "key")
            v = project(value, self.value_size, "value")
            out = fused.attention(q, k, v, causal=True)
            return hk.Linear(self.model_size, w_init=self.w_init, name="linear")(
                out.reshape(query.shape)
            )

    return hk, Fused


def _norm(x: jax.Array) -> jax.Array:
    hk, _ = _modules()
    norm = hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)
    return norm(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)


def hidden(config: Config, is_fused: bool, tokens: jax.Array) -> jax.Array:
    """Activations before the head."""
    hk, kernel = _modules()
    scaled = hk.initializers.VarianceScaling(2 / config.layers)
    embedding = hk.Embed(
        config.vocabulary, config.width, w_init=hk.initializers.TruncatedNormal(0.02)
    )
    positions = hk.get_parameter(
        "positions", [config.length, config.width], init=hk.initializers.TruncatedNormal(0.02)
    )
    mask = jnp.tril(jnp.ones((1, 1, tokens.shape[1], tokens.shape[1])))
    x = embedding(tokens) + positions
    for i in range(config.layers):
        attend = (kernel if is_fused else hk.MultiHeadAttention)(
            config.heads, config.width // config.heads, w_init=scaled, name=f"attention_{i}"
        )
        y = _norm(x)
        x = x + attend(y, y, y, mask=mask)
        y = hk.Linear(4 * config.width, w_init=scaled)(_norm(x))
        x = x + hk.Linear(config.width, w_init=scaled)(jax.nn.gelu(y))
    return _norm(x)


def _size(config: Config) -> Size:
    @cache
    def network(is_fused: bool) -> Any:
        hk, _ = _modules()
        return hk.without_apply_rng(hk.transform(partial(hidden, config, is_fused)))

    @cache
    def head() -> Any:
        hk, _ = _modules()
        return hk.without_apply_rng(hk.transform(lambda x: hk.Linear(config.vocabulary)(x)))

    def init(key: jax.Array) -> Any:
        body = network(False).init(key, jnp.zeros((1, config.length), jnp.int32))
        return {"body": body, "head": head().init(key, jnp.zeros((1, config.width)))}

    def loss(dtype: Any, is_fused: bool, params: Any, tokens: jax.Array) -> Any:
        low = jax.tree.map(lambda p: p.astype(dtype or p.dtype), params)
        x = network(is_fused).apply(low["body"], tokens[:, :-1])
        return losses(partial(head().apply, low["head"]), x, tokens[:, 1:]).mean(), None

    def sample(key: jax.Array) -> jax.Array:
        return chain_of_tokens(key, config.batch, config.length + 1, config.vocabulary)

    size = Size(
        init=init,
        sample=sample,
        plain=partial(loss, None, False),
        hands={HAND: partial(loss, LOW, False), FUSED: partial(loss, LOW, True)},
    )
    return chunked(size)


HAIKU = Model("haiku", "a causal model of haiku's modules", _size(FULL), _size(SMALL))
