"""The transformer as haliax modules: named axes, stacked layers."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from data import Sizes, make_features, make_words


class Layer(eqx.Module):
    """Attention, then a network of two layers."""

    norm1: Any
    query: Any
    key: Any
    value: Any
    out: Any
    norm2: Any
    up: Any
    down: Any

    @staticmethod
    def init(axes: dict[str, hax.Axis], *, key: Any) -> Layer:
        embed, inner = axes["embed"], (axes["heads"], axes["head_size"])
        keys = jax.random.split(key, 6)

        def linear(index: int, before: Any, after: Any) -> Any:
            return hnn.Linear.init(before, after, key=keys[index], use_bias=False)

        return Layer(
            norm1=hnn.LayerNorm.init(embed, use_bias=False),
            query=linear(0, embed, inner),
            key=linear(1, embed, inner),
            value=linear(2, embed, inner),
            out=linear(3, inner, embed),
            norm2=hnn.LayerNorm.init(embed, use_bias=False),
            up=linear(4, embed, axes["mlp"]),
            down=linear(5, axes["mlp"], embed),
        )

    def __call__(self, x: Any) -> Any:
        y = self.norm1(x)
        k, v = (linear(y).rename({"position": "past"}) for linear in (self.key, self.value))
        mask = hnn.attention.causal_mask(x.resolve_axis("position"), k.resolve_axis("past"))
        mixed = hnn.attention.dot_product_attention(
            "past", "head_size", self.query(y), k, v, mask=mask
        )
        x = x + self.out(mixed)
        return x + self.down(hnn.gelu(self.up(self.norm2(x))))


class Model(eqx.Module):
    """Layers, scanned, and logits of words."""

    layers: Any
    norm: Any
    head: Any

    def __call__(self, x: Any) -> Any:
        return self.head(self.norm(self.layers.fold(x)))


def _axes(size: Sizes) -> dict[str, hax.Axis]:
    width, heads = size["width"], size["heads"]
    sizes = {"embed": width, "heads": heads, "head_size": width // heads, "mlp": 4 * width}
    sizes |= {name: size[name] for name in ("batch", "layers", "words")}
    return {name: hax.Axis(name, value) for name, value in sizes.items()} | {
        "position": hax.Axis("position", size["length"])
    }


def loss(model: Any, x: Any, words: Any) -> Any:
    logits = model(x)
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    exact = hnn.one_hot(words, wide.resolve_axis("words"), dtype=wide.dtype)
    losses: Any = hnn.cross_entropy_loss(wide, "words", exact)
    return losses.mean().scalar()


def make(size: Sizes) -> tuple[Any, ...]:
    """The loss, a model and its inputs."""
    axes = _axes(size)
    layers_key, head_key = jax.random.split(jax.random.key(0))
    stacked = hnn.Stacked.init(axes["layers"], Layer)
    layers = stacked(axes, key=jax.random.split(layers_key, size["layers"]))
    head = hnn.Linear.init(axes["embed"], axes["words"], key=head_key, use_bias=False)
    model = Model(layers, hnn.LayerNorm.init(axes["embed"], use_bias=False), head)
    outer = axes["batch"], axes["position"]
    x = hax.named(make_features(size), (*outer, axes["embed"]))
    return loss, model, x, hax.named(make_words(size), outer)
