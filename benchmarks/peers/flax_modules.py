"""The transformer as flax modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from data import Sizes, make_features, make_words
from programs import attention, cross_entropy


class Layer(nn.Module):
    """One layer; `dense` are options of every Dense, `plain` those of every LayerNorm."""

    heads: int
    dense: dict[str, Any]
    plain: dict[str, Any]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        width = x.shape[-1]
        y = nn.LayerNorm(use_bias=False, **self.plain)(x)
        q, k, v = jnp.split(nn.Dense(3 * width, use_bias=False, **self.dense)(y), 3, -1)
        x = x + nn.Dense(width, use_bias=False, **self.dense)(attention(q, k, v, self.heads))
        y = nn.LayerNorm(use_bias=False, **self.plain)(x)
        y = jax.nn.gelu(nn.Dense(4 * width, use_bias=False, **self.dense)(y))
        return x + nn.Dense(width, use_bias=False, **self.dense)(y)


class Model(nn.Module):
    """Layers, written out, and logits of words."""

    layers: int
    words: int
    heads: int
    dense: dict[str, Any]
    plain: dict[str, Any]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(self.layers):
            x = Layer(self.heads, self.dense, self.plain)(x)
        x = nn.LayerNorm(use_bias=False, **self.plain)(x)
        return nn.Dense(self.words, use_bias=False, **self.dense)(x)


def make(
    size: Sizes, convert: Callable[[Any], Any] = lambda model: model, **options: Any
) -> tuple[Any, ...]:
    """A loss of the model, its parameters and its inputs; `options` are those of every Dense."""
    plain = {k: v for k, v in options.items() if k == "dtype"}
    model = Model(size["layers"], size["words"], size["heads"], options, plain)
    x, words = make_features(size), make_words(size)
    model = convert(model)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    state = {k: v for k, v in variables.items() if k != "params"}

    def loss(params: Any, x: Any, words: Any) -> Any:
        logits = model.apply({"params": params, **state}, x)
        wide = jnp.promote_types(logits.dtype, jnp.float32)
        return cross_entropy(logits.astype(wide), words)

    return loss, variables["params"], x, words
