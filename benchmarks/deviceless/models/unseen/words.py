"""Speech, a fine-tuned decoder, and decoding: an encoder with CTC, LoRA, steps with a cache.

See: Gulati et al. 2020, arXiv:2005.08100; Hu et al. 2022, arXiv:2106.09685.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.deviceless.models.heads import chunked, losses
from benchmarks.deviceless.models.model import (
    Config,
    Model,
    Size,
    chain_of_tokens,
    weights,
)
from benchmarks.deviceless.models.unseen.parts import (
    LOW,
    Attend,
    attending,
    dense,
    flat,
    heads,
    layer_norm,
    linear,
    norm_params,
    rms_norm,
    size,
    wide,
)

MELS, TAPS, RANK = 80, 31, 16


# A Conformer: half a perceptron, attention, a convolution, half a perceptron.


def speech_init(config: Config, key: jax.Array) -> Any:
    width = config.width
    draw = weights(key, 9 * config.layers + 4)

    def half() -> Any:
        return {
            "norm": norm_params(width),
            "grow": linear(draw, width, 4 * width),
            "shrink": linear(draw, 4 * width, width),
        }

    layers = [
        {
            "first": half(),
            "norm1": norm_params(width),
            "qkv": linear(draw, width, 3 * width),
            "out": linear(draw, width, width),
            "norm2": norm_params(width),
            "wide": linear(draw, width, 2 * width),
            "taps": draw(TAPS, 1, width, added=TAPS),
            "norm3": norm_params(width),
            "narrow": linear(draw, width, width),
            "last": half(),
            "norm": norm_params(width),
        }
        for _ in range(config.layers)
    ]
    return {
        "conv1": draw(3, 3, 1, 32, added=9),
        "conv2": draw(3, 3, 32, 32, added=288),
        "in": linear(draw, 32 * MELS // 4, width),
        "layers": layers,
        "head": linear(draw, width, config.vocabulary),
    }


def perceptron(p: Any, x: jax.Array) -> jax.Array:
    return dense(p["shrink"], jax.nn.silu(dense(p["grow"], layer_norm(p["norm"], x))))


def conformer(config: Config, attend: Attend, p: Any, x: jax.Array) -> jax.Array:
    x = x + 0.5 * perceptron(p["first"], x)
    qkv = dense(p["qkv"], layer_norm(p["norm1"], x))
    q, k, v = (heads(y, config.width // config.heads) for y in jnp.split(qkv, 3, -1))
    x = x + dense(p["out"], flat(attend(q, k, v, causal=False)))
    y = jax.nn.glu(dense(p["wide"], layer_norm(p["norm2"], x)))
    y = jax.lax.conv_general_dilated(
        y,
        p["taps"].astype(y.dtype),
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=config.width,
    )
    x = x + dense(p["narrow"], jax.nn.silu(layer_norm(p["norm3"], y)))
    x = x + 0.5 * perceptron(p["last"], x)
    return layer_norm(p["norm"], x)


def speech_loss(config: Config, dtype: Any, attend: Attend, params: Any, batch: Any) -> Any:
    sound, labels, padding = batch
    x = sound[..., None].astype(dtype)
    for name in ("conv1", "conv2"):
        kernel = params[name].astype(dtype)
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=numbers)
        x = jax.nn.relu(x)
    x = dense(params["in"], x.reshape(*x.shape[:2], -1))
    for p in params["layers"]:
        x = conformer(config, attend, p, x)
    logits = wide(dense(params["head"], x))
    return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, padding).mean(), None


def _speech(config: Config) -> Size:
    def sample(key: jax.Array) -> Any:
        sound = jax.random.normal(key, (config.batch, 4 * config.length, MELS))
        labels = jax.random.randint(key, (config.batch, 16), 1, config.vocabulary)
        return sound, labels, jnp.zeros(labels.shape)

    return attending(partial(speech_init, config), sample, partial(speech_loss, config))


SPEECH = Model(
    "speech",
    "a speech encoder with CTC",
    _speech(Config(layers=2, width=512, heads=8, length=512, batch=16, vocabulary=1024)),
    _speech(Config(layers=2, width=32, heads=2, length=32, batch=4, vocabulary=32)),
)


# A decoder that is not trained, and what is trained beside it.


def frozen(config: Config, key: jax.Array) -> Any:
    """A checkpoint, with a head of keys for every two of queries."""
    width, hidden, narrow = config.width, 3 * config.width, config.width // 2
    draw = weights(key, 7 * config.layers + 2)
    matrix = partial(linear, draw, bias=False)

    layers = [
        {
            "norm1": jnp.ones(width),
            "q": matrix(width, width),
            "k": matrix(width, narrow),
            "v": matrix(width, narrow),
            "o": matrix(width, width),
            "norm2": jnp.ones(width),
            "gate": matrix(width, hidden),
            "grow": matrix(width, hidden),
            "shrink": matrix(hidden, width),
        }
        for _ in range(config.layers)
    ]
    tokens = draw(config.vocabulary, width, added=1)
    return {"tokens": tokens, "layers": layers, "norm": jnp.ones(width)}


def rotated(x: jax.Array, places: jax.Array) -> jax.Array:
    """Rotate pairs of [B, T, N, H] by their place, in float32."""
    angles = (places[:, None] * 10000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2))[:, None]
    one, other = jnp.split(wide(x), 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([one * cos - other * sin, one * sin + other * cos], -1).astype(x.dtype)


def swiglu(p: Any, x: jax.Array) -> jax.Array:
    return dense(p["shrink"], jax.nn.silu(dense(p["gate"], x)) * dense(p["grow"], x))


def lora_init(config: Config, key: jax.Array) -> Any:
    draw = weights(key, 4 * config.layers)
    outputs = {"q": config.width, "k": config.width // 2, "v": config.width // 2, "o": config.width}
    return [
        {n: {"down": draw(config.width, RANK), "up": jnp.zeros((RANK, outputs[n]))} for n in "qkvo"}
        for _ in range(config.layers)
    ]


def adapted(p: Any, adapter: Any, x: jax.Array) -> jax.Array:
    down, up = adapter["down"].astype(x.dtype), adapter["up"].astype(x.dtype)
    return dense(p, x) + 2 * ((x @ down) @ up)


def lora_loss(config: Config, dtype: Any, attend: Attend, params: Any, batch: Any) -> Any:
    given, tokens = batch
    head = config.width // config.heads
    x = given["tokens"][tokens[:, :-1]].astype(dtype)
    places = jnp.arange(x.shape[1])
    for p, adapters in zip(given["layers"], params, strict=True):
        y = rms_norm(p["norm1"], x)
        q, k, v = (heads(adapted(p[name], adapters[name], y), head) for name in "qkv")
        k, v = (jnp.repeat(part, 2, 2) for part in (rotated(k, places), v))
        y = flat(attend(rotated(q, places), k, v, causal=True))
        x = x + adapted(p["o"], adapters["o"], y)
        x = x + swiglu(p, rms_norm(p["norm2"], x))
    x, head = rms_norm(given["norm"], x), given["tokens"].T.astype(dtype)
    return losses(lambda x: x @ head, x, tokens[:, 1:]).mean(), None


def _lora(config: Config) -> Size:
    def sample(key: jax.Array) -> Any:
        tokens = chain_of_tokens(key, config.batch, config.length + 1, config.vocabulary)
        return frozen(config, key), tokens

    return chunked(attending(partial(lora_init, config), sample, partial(lora_loss, config)))


LORA = Model(
    "lora",
    "adapters of a frozen decoder",
    _lora(Config(layers=3, width=1024, heads=16, length=1024, batch=4, vocabulary=16384)),
    _lora(Config(layers=2, width=64, heads=4, length=32, batch=4, vocabulary=128)),
)


# Decoding with a cache of bfloat16: one step, and a loop of steps that take the likeliest word.


def decode_step(config: Config, dtype: Any, params: Any, batch: Any) -> Any:
    cache, tokens, place = batch
    head, new = config.width // config.heads, []
    x = params["tokens"][tokens[:, None]].astype(dtype)
    ahead = jnp.arange(config.length) > place
    for p, (keys, values) in zip(params["layers"], cache, strict=True):
        y = rms_norm(p["norm1"], x)
        q, k, v = (heads(dense(p[name], y), head) for name in "qkv")
        places = place[None]
        update = partial(jax.lax.dynamic_update_slice_in_dim, start_index=place, axis=1)
        keys = update(keys, rotated(k, places).astype(LOW))
        values = update(values, v.astype(LOW))
        new.append((keys, values))
        q = rotated(q, places).reshape(len(x), keys.shape[2], -1, head)
        scores = wide(jnp.einsum("bngh,btnh->bngt", q, keys.astype(dtype))) * head**-0.5
        shares = jax.nn.softmax(jnp.where(ahead, -jnp.inf, scores)).astype(dtype)
        y = jnp.einsum("bngt,btnh->bngh", shares, values.astype(dtype))
        x = x + dense(p["o"], y.reshape(x.shape))
        x = x + swiglu(p, rms_norm(p["norm2"], x))
    logits = rms_norm(params["norm"], x) @ params["tokens"].T.astype(dtype)
    return wide(logits[:, 0]), new


def generate(config: Config, steps: int, dtype: Any, params: Any, batch: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
        cache, tokens, place = carry
        logits, cache = decode_step(config, dtype, params, carry)
        tokens = jnp.argmax(logits, -1)
        return (cache, tokens, place + 1), tokens

    return jax.lax.scan(step, batch, None, steps)


def _decode(config: Config, steps: int) -> Size:
    def sample(key: jax.Array) -> Any:
        shape = (config.batch, config.length, config.heads // 2, config.width // config.heads)
        cache = [(jnp.zeros(shape, LOW), jnp.zeros(shape, LOW)) for _ in range(config.layers)]
        tokens = jax.random.randint(key, (config.batch,), 0, config.vocabulary)
        return cache, tokens, jnp.asarray(config.length // 2)

    run = partial(generate, config, steps) if steps else partial(decode_step, config)
    return size(partial(frozen, config), sample, run, gradient=False)


_DECODED = Config(layers=3, width=2048, heads=16, length=1024, batch=16, vocabulary=16384)
_LITTLE = Config(layers=2, width=64, heads=4, length=32, batch=4, vocabulary=128)
DECODE = Model("decode", "a decode step with a cache", _decode(_DECODED, 0), _decode(_LITTLE, 0))
GENERATE = Model("generate", "a loop of such steps", _decode(_DECODED, 16), _decode(_LITTLE, 4))
