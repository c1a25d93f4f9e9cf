"""The models that `benchmarks.on_a_gpu` times, in the sizes of their names and for a CPU.

Language models read the sources of Python's standard library, classifiers look at handwritten
digits, as scikit-learn ships them; without it at patterns under noise, which take the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import real_images, real_text
from benchmarks.deviceless.models import resnet, transformer, vit
from benchmarks.deviceless.models.model import Config, Size
from benchmarks.deviceless.models.unseen import recurrences, words


def _transformer(
    layers: int,
    width: int,
    heads: int,
    words: int,
    length: int = 1024,
    saves: transformer.Saves = transformer.NOTHING,
) -> Size:
    config = transformer.Config(layers, width, heads, length, words // length, 50304)
    return _reading(transformer._size(config, scanned=True, saves=saves), config.vocabulary)


def _shapes(size: Size) -> Any:
    return jax.eval_shape(size.sample, jax.random.key(0))


def _reading(size: Size, vocabulary: int) -> Size:
    """A language model that learns from real text, in batches of the same shape."""
    batch, length = _shapes(size).shape
    return replace(size, sample=lambda key: real_text.sequences(key, batch, length, vocabulary))


def _seeing(size: Size) -> Size:
    """A classifier that looks at real images."""
    if not find_spec("sklearn"):
        return size
    batch, side = _shapes(size)[0].shape[:2]
    return replace(size, sample=lambda key: real_images.labelled(key, batch, side))


def _chunks(layers: int, width: int, batch: int, length: int) -> Size:
    config = Config(layers, width, width // 32, length, batch, 50304)
    size = recurrences._size(recurrences.ssd_init, recurrences.ssd_loss, config, 128)
    return _reading(size, config.vocabulary)


def _generating(size: Size) -> Size:
    """A decoder that continues sequences, whose cache is its state."""

    def init(key: jax.Array) -> Any:
        cache, _, place = size.sample(key)
        return size.init(key), (cache, place)

    def run(loss: Any, kept: Any, tokens: jax.Array) -> Any:
        params, (cache, place) = kept
        (cache, tokens, _), _ = loss(params, (cache, tokens, place))
        return jnp.sum(tokens), (cache, place)

    hands = {name: partial(run, loss) for name, loss in size.hands.items()}
    drawn = lambda key: size.sample(key)[1]  # noqa: E731
    return replace(size, init=init, sample=drawn, plain=partial(run, size.plain), hands=hands)


_350M = partial(_transformer, 24, 1024, 16, 16384)
_1300M = partial(_transformer, 24, 2048, 16, 8192)

PRODUCTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
EVERYTHING = jax.checkpoint_policies.everything_saveable

MODELS: dict[str, Callable[[], Size]] = {
    "350m": _350M,
    "350m-products": partial(_350M, saves=PRODUCTS),
    "350m-everything": partial(_350M, saves=EVERYTHING),
    "1.3b": _1300M,
    "wide": partial(_transformer, 4, 4096, 32, 8192, 2048),
    "resnet50": lambda: _seeing(resnet.size(width=64, classes=1000, batch=128, side=224)),
    "vit-b": lambda: _seeing(vit._size(12, 768, 12, 16, 1000, 128, 224)),
    "ssd": partial(_chunks, 4, 1024, 4, 2048),
    "decode": lambda: _generating(words.GENERATE.full),
}


def _toy_words(model: Any) -> Callable[[], Size]:
    return lambda: _reading(model.small, 128)


def _toy_saving(saves: transformer.Saves) -> Size:
    size = transformer._size(transformer.SMALL, scanned=True, saves=saves)
    return _reading(size, transformer.SMALL.vocabulary)


TOYS: dict[str, Callable[[], Size]] = {
    "350m": _toy_words(transformer.SCANNED),
    "350m-products": lambda: _toy_saving(PRODUCTS),
    "350m-everything": lambda: _toy_saving(EVERYTHING),
    "1.3b": _toy_words(transformer.UNROLLED),
    "wide": _toy_words(transformer.SCANNED),
    "resnet50": lambda: _seeing(resnet.RESNET50.small),
    "vit-b": lambda: _seeing(vit.VIT.small),
    "ssd": _toy_words(recurrences.SSD),
    "decode": lambda: _generating(words.GENERATE.small),
}
