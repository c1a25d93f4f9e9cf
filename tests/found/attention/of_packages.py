"""Softmax attention as packages write it, through their own modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.found.attention.corpus import SPELLINGS, B, H, N, T, made
from tests.programs.registry import Args, Draw

Fn = Callable[..., Any]
Built = tuple[Fn, Args]

package = partial(made, SPELLINGS)

WIDTH = N * H
KEY = jax.random.key(0)


def _words(name: str, length: int = T) -> np.ndarray:
    return Draw(name).normal(B, length, WIDTH)


def _present() -> np.ndarray:
    return np.arange(T) < np.array([[T], [T - 9]])


def _tokens(length: int = T) -> np.ndarray:
    return Draw("tokens").integers(64, B, length)


# flax linen


@package("flax")
def linen_function() -> Built:
    """`nn.dot_product_attention`."""
    from flax import linen as nn

    x = _words("linen").reshape(B, T, N, H)
    return nn.dot_product_attention, (x, np.sin(x), np.cos(x))


def _linen(module: Any, *args: Any, **words: Any) -> Built:
    params = module.init(KEY, *args, **words)
    return lambda params, *args: module.apply(params, *args, **words), (params, *args)


@package("flax")
def linen_self_attention() -> Built:
    """`MultiHeadDotProductAttention` of one sequence."""
    from flax import linen as nn

    return _linen(nn.MultiHeadDotProductAttention(N), _words("a"))


@package("flax")
def linen_causal() -> Built:
    """With `make_causal_mask`."""
    from flax import linen as nn

    mask = nn.make_causal_mask(jnp.ones((B, T)))
    return _linen(nn.MultiHeadDotProductAttention(N), _words("a"), mask=mask)


@package("flax")
def linen_masks_combined() -> Built:
    """Causal and padding."""
    from flax import linen as nn

    seen = jnp.asarray(_present())
    mask = nn.combine_masks(nn.make_causal_mask(seen), nn.make_attention_mask(seen, seen))
    return _linen(nn.MultiHeadDotProductAttention(N), _words("a"), mask=mask)


@package("flax")
def linen_cross() -> Built:
    """Of another sequence."""
    from flax import linen as nn

    return _linen(nn.MultiHeadDotProductAttention(N), _words("a"), _words("b", T // 2))


@package("flax")
def linen_dropout_off() -> Built:
    """With dropout that is not on."""
    from flax import linen as nn

    module = nn.MultiHeadDotProductAttention(N, dropout_rate=0.1, deterministic=True)
    return _linen(module, _words("a"))


@package("flax")
def linen_normalised() -> Built:
    """With norms of queries and keys."""
    from flax import linen as nn

    return _linen(nn.MultiHeadDotProductAttention(N, normalize_qk=True), _words("a"))


@package("flax")
def linen_in_a_scan() -> Built:
    """Layers under `nn.scan` of `nn.remat`."""
    from flax import linen as nn

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            return x + nn.MultiHeadDotProductAttention(N)(nn.LayerNorm()(x)), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            scanned: Any = nn.scan(
                nn.remat(Layer, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            return scanned()(x, None)[0]

    return _linen(Stack(), _words("a"))


# flax nnx


def _nnx(module: Any, *args: Any, **words: Any) -> Built:
    from flax import nnx

    definition, params, rest = nnx.split(module, nnx.Param, ...)

    def run(params: Any, *args: Any) -> Any:
        return nnx.merge(definition, params, rest)(*args, **words)

    return run, (jax.tree.map(np.asarray, nnx.to_pure_dict(params)), *args)


@package("flax")
def nnx_function() -> Built:
    """`nnx.dot_product_attention`."""
    from flax import nnx

    x = _words("nnx").reshape(B, T, N, H)
    return nnx.dot_product_attention, (x, np.sin(x), np.cos(x))


@package("flax")
def nnx_self_attention() -> Built:
    """`nnx.MultiHeadAttention`."""
    from flax import nnx

    return _nnx(nnx.MultiHeadAttention(N, WIDTH, decode=False, rngs=nnx.Rngs(0)), _words("a"))


@package("flax")
def nnx_causal() -> Built:
    """With its causal mask."""
    from flax import nnx

    mask = nnx.make_causal_mask(jnp.ones((B, T)))
    module = nnx.MultiHeadAttention(N, WIDTH, decode=False, rngs=nnx.Rngs(0))
    return _nnx(module, _words("a"), mask=mask)


@package("flax")
def nnx_dropout_off() -> Built:
    """With a rate of dropout, which is not on: weights and values by an einsum of its own."""
    from flax import nnx

    module = nnx.MultiHeadAttention(
        N, WIDTH, decode=False, dropout_rate=0.1, deterministic=True, rngs=nnx.Rngs(0)
    )
    return _nnx(module, _words("a"))


# equinox


def _equinox(module: Any, call: Fn, *args: Any) -> Built:
    import equinox as eqx

    params, static = eqx.partition(module, eqx.is_inexact_array)
    return lambda params, *args: call(eqx.combine(params, static), *args), (params, *args)


def _eqx_attention(**words: Any) -> Any:
    import equinox as eqx

    return eqx.nn.MultiheadAttention(N, WIDTH, key=KEY, **words)


@package("equinox")
def equinox_self_attention() -> Built:
    """`eqx.nn.MultiheadAttention` under vmap."""
    return _equinox(_eqx_attention(), lambda m, x: jax.vmap(m)(x, x, x), _words("a"))


@package("equinox")
def equinox_causal() -> Built:
    """With a mask of one example."""

    def call(module: Any, x: Any) -> Any:
        mask = jnp.tril(jnp.ones((T, T), bool))
        return jax.vmap(lambda x: module(x, x, x, mask=mask))(x)

    return _equinox(_eqx_attention(), call, _words("a"))


@package("equinox")
def equinox_mask_of_heads() -> Built:
    """With a mask of each head."""

    def call(module: Any, x: Any) -> Any:
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (N, T, T))
        return jax.vmap(lambda x: module(x, x, x, mask=mask))(x)

    return _equinox(_eqx_attention(use_query_bias=True), call, _words("a"))


@package("equinox")
def equinox_cross() -> Built:
    """Of another sequence."""
    memory = _words("b", T // 2)
    return _equinox(_eqx_attention(), lambda m, x, y: jax.vmap(m)(x, y, y), _words("a"), memory)


@package("equinox")
def equinox_rotary() -> Built:
    """With rotary positions, by its own hook."""
    import equinox as eqx

    turn = eqx.nn.RotaryPositionalEmbedding(H)

    def heads(q: Any, k: Any, v: Any) -> Any:
        return jax.vmap(turn, 1, 1)(q), jax.vmap(turn, 1, 1)(k), v

    def call(module: Any, x: Any) -> Any:
        return jax.vmap(lambda x: module(x, x, x, process_heads=heads))(x)

    return _equinox(_eqx_attention(), call, _words("a"))


@package("equinox")
def equinox_in_a_scan() -> Built:
    """Layers made by `filter_vmap` and run by a scan."""
    import equinox as eqx

    @eqx.filter_vmap
    def build(key: Any) -> Any:
        return eqx.nn.MultiheadAttention(N, WIDTH, key=key)

    dynamic, static = eqx.partition(build(jax.random.split(KEY, 3)), eqx.is_inexact_array)

    def run(params: Any, x: Any) -> Any:
        def step(x: Any, params: Any) -> Any:
            module = eqx.combine(params, static)
            return x + jax.vmap(lambda x: module(x, x, x))(x), None

        return jax.lax.scan(step, x, params)[0]

    return run, (dynamic, _words("a"))


# haliax


def _haliax(mask: bool, bias: bool) -> Built:
    import haliax as hax
    from haliax.nn import attention

    batch, position, keys = hax.Axis("batch", B), hax.Axis("position", T), hax.Axis("keys", T)
    heads, size = hax.Axis("heads", N), hax.Axis("size", H)

    def run(q: Any, k: Any, v: Any, added: Any) -> Any:
        q = hax.named(q, (batch, position, heads, size))
        k, v = (hax.named(x, (batch, keys, heads, size)) for x in (k, v))
        return attention.dot_product_attention(
            keys,
            size,
            q,
            k,
            v,
            mask=attention.causal_mask(position, keys) if mask else None,
            bias=hax.named(added, (heads, position, keys)) if bias else None,
        ).array

    d = Draw("haliax")
    return run, (*(d.normal(B, T, N, H) for _ in range(3)), d.normal(N, T, T))


@package("haliax")
def haliax_plain() -> Built:
    """Named axes."""
    return _haliax(False, False)


@package("haliax")
def haliax_causal() -> Built:
    """With its causal mask."""
    return _haliax(True, False)


@package("haliax")
def haliax_bias() -> Built:
    """With a bias of heads, and causal."""
    return _haliax(True, True)


# haiku


def _haiku(run: Fn, *args: Any) -> Built:
    import haiku as hk

    net = hk.without_apply_rng(hk.transform(run))
    return net.apply, (net.init(KEY, *args), *args)


@package("haiku")
def haiku_self_attention() -> Built:
    """`hk.MultiHeadAttention`."""
    import haiku as hk

    def run(x: Any) -> Any:
        return hk.MultiHeadAttention(N, H, w_init=hk.initializers.VarianceScaling())(x, x, x)

    return _haiku(run, _words("a"))


@package("haiku")
def haiku_masked() -> Built:
    """With a causal mask."""
    import haiku as hk

    def run(x: Any) -> Any:
        attend = hk.MultiHeadAttention(N, H, w_init=hk.initializers.VarianceScaling())
        return attend(x, x, x, mask=np.tril(np.ones((1, 1, T, T))))

    return _haiku(run, _words("a"))


# transformers


def _transformer(net: Any, *args: Any, **words: Any) -> Built:
    def run(params: Any) -> Any:
        return net(*args, params=params, train=False, **words)[0]

    return run, (jax.tree.map(np.asarray, net.params),)


_SMALL = {"vocab_size": 64, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": N}


@package("transformers", "flax", count=2)
def transformers_bert() -> Built:
    """BERT with a padding mask."""
    from transformers import BertConfig, FlaxBertModel

    config = BertConfig(**_SMALL, intermediate_size=64, max_position_embeddings=T)
    net = FlaxBertModel(config, seed=0, input_shape=(1, T), add_pooling_layer=False)
    return _transformer(net, _tokens(), attention_mask=_present().astype(np.int32))


@package("transformers", "flax", count=2)
def transformers_gpt2() -> Built:
    """GPT-2."""
    from transformers import FlaxGPT2Model, GPT2Config

    config = GPT2Config(vocab_size=64, n_embd=WIDTH, n_layer=2, n_head=N, n_positions=T)
    return _transformer(FlaxGPT2Model(config, seed=0, input_shape=(1, T)), _tokens())


@package("transformers", "flax", count=2)
def transformers_llama() -> Built:
    """Llama with grouped queries and rotary positions."""
    from transformers import FlaxLlamaModel, LlamaConfig

    config = LlamaConfig(
        **_SMALL, num_key_value_heads=2, intermediate_size=64, max_position_embeddings=T
    )
    return _transformer(FlaxLlamaModel(config, seed=0, input_shape=(1, T)), _tokens())


@package("transformers", "flax", count=2)
def transformers_vit() -> Built:
    """ViT: a class token makes 17 words of 16 patches."""
    from transformers import FlaxViTModel, ViTConfig

    words = {k: v for k, v in _SMALL.items() if k != "vocab_size"}
    config = ViTConfig(**words, intermediate_size=64, image_size=16, patch_size=4)
    net = FlaxViTModel(config, seed=0, input_shape=(1, 16, 16, 3))
    return _transformer(net, Draw("images").normal(B, 3, 16, 16))


@package("transformers", "flax", count=2)
def transformers_mistral() -> Built:
    """Mistral: grouped queries and a sliding window."""
    from transformers import FlaxMistralModel, MistralConfig

    config = MistralConfig(
        **_SMALL, num_key_value_heads=2, intermediate_size=64, max_position_embeddings=T,
        sliding_window=8,
    )  # fmt: skip
    return _transformer(FlaxMistralModel(config, seed=0, input_shape=(1, T)), _tokens())


@package("transformers", "flax", count=6)
def transformers_bart() -> Built:
    """BART: an encoder, a causal decoder, cross attention."""
    from transformers import BartConfig, FlaxBartModel

    words = {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in _BART.items()}
    config = BartConfig(vocab_size=64, d_model=WIDTH, max_position_embeddings=T, **words)
    net = FlaxBartModel(config, seed=0, input_shape=(1, T))
    return _transformer(net, _tokens(), decoder_input_ids=_tokens(T // 2))


_BART = {"layers": 2, "attention_heads": N, "ffn_dim": 64}
