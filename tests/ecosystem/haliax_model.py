"""A transformer as one writes it with haliax: named axes, stacked blocks, causal attention."""

from __future__ import annotations

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis

Batch, Pos, KeyPos = Axis("batch", 4), Axis("position", 8), Axis("key_position", 8)
Vocab, Embed = Axis("vocab", 40), Axis("embed", 32)
Heads, HeadSize, Layers = Axis("heads", 4), Axis("head_size", 8), Axis("layers", 2)


class Block(eqx.Module):
    """Attention, then a two-layer network."""

    norm1: hnn.LayerNorm
    query: hnn.Linear
    key: hnn.Linear
    value: hnn.Linear
    out: hnn.Linear
    norm2: hnn.LayerNorm
    mlp: hnn.MLP

    @staticmethod
    def init(*, key) -> Block:
        keys = jax.random.split(key, 5)
        query, key_, value = (
            hnn.Linear.init(Embed, (Heads, HeadSize), key=k, use_bias=False) for k in keys[:3]
        )
        out = hnn.Linear.init((Heads, HeadSize), Embed, key=keys[3])
        mlp = hnn.MLP.init(Embed, Embed, 64, 1, key=keys[4])
        norm1, norm2 = hnn.LayerNorm.init(Embed), hnn.LayerNorm.init(Embed)
        return Block(norm1, query, key_, value, out, norm2, mlp)

    def __call__(self, x):
        normed = self.norm1(x)
        key, value = (
            f(normed).rename({"position": "key_position"}) for f in (self.key, self.value)
        )
        mask = hnn.attention.causal_mask(Pos, KeyPos)
        mixed = hnn.attention.dot_product_attention(
            KeyPos, HeadSize, self.query(normed), key, value, mask=mask
        )
        x = x + self.out(mixed)
        return x + self.mlp(self.norm2(x))


class LanguageModel(eqx.Module):
    """Predicts the next word at every position; embedding and head are tied."""

    embedding: hnn.Embedding
    blocks: hnn.Stacked
    norm: hnn.LayerNorm

    @staticmethod
    def init(*, key) -> LanguageModel:
        embedding_key, blocks_key = jax.random.split(key)
        stacked = hnn.Stacked.init(Layers, Block, gradient_checkpointing=True)
        return LanguageModel(
            hnn.Embedding.init(Vocab, Embed, key=embedding_key),
            stacked(key=jax.random.split(blocks_key, Layers.size)),  # type: ignore[arg-type]
            hnn.LayerNorm.init(Embed),
        )

    def __call__(self, ids):
        x = self.blocks.fold(self.embedding(ids))
        return self.embedding.unembed(self.norm(x))  # type: ignore[arg-type]


def loss_fn(model, ids, targets):
    logits = model(ids).astype(jnp.float32)
    one_hot = hnn.one_hot(targets, Vocab, dtype=jnp.float32)
    losses: hax.NamedArray = hnn.cross_entropy_loss(logits, Vocab, one_hot)  # type: ignore[assignment]
    return losses.mean().scalar()


def make():
    """A model, word ids and the ids that follow them."""
    keys = jax.random.split(jax.random.key(0), 3)
    ids, targets = (hax.random.randint(k, (Batch, Pos), 0, Vocab.size) for k in keys[1:])
    return LanguageModel.init(key=keys[0]), ids, targets
