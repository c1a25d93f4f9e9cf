"""The models that `benchmarks.gpu_train` trains, in the sizes of their names and for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax

from benchmarks import real_text
from benchmarks.deviceless.models import encoder, resnet, transformer, unet, vit
from benchmarks.deviceless.models.model import Size

LENGTHS = (512, 2048, 8192)
"""Words in a sequence of the models that attend; as many words in a batch of each."""


def _transformer(layers: int, width: int, heads: int, words: int, length: int = 1024) -> Size:
    config = transformer.Config(layers, width, heads, length, words // length, 50304)
    return _reading(transformer._size(config, scanned=True), config.vocabulary)


def _reading(size: Size, vocabulary: int) -> Size:
    """A language model that learns from real text, in batches of the same shape."""
    batch, length = jax.eval_shape(size.sample, jax.random.key(0)).shape
    return replace(size, sample=lambda key: real_text.sequences(key, batch, length, vocabulary))


def _bert(words: int, length: int) -> Size:
    return encoder._size(encoder.Config(12, 768, 12, length, words // length, 30522))


_350M = partial(_transformer, 24, 1024, 16, 16384)
_1300M = partial(_transformer, 24, 2048, 16, 8192)
_BERT = partial(_bert, 16384)

MODELS: dict[str, Callable[[], Size]] = {
    "350m": _350M,
    "1.3b": _1300M,
    "wide": partial(_transformer, 4, 4096, 32, 8192, 2048),
    "resnet50": lambda: resnet._size(width=64, classes=1000, batch=128, side=224),
    "vit-b": lambda: vit._size(12, 768, 12, 16, 1000, 128, 224),
    "unet": lambda: unet.UNET.full,
    **{f"350m-{length}": partial(_350M, length) for length in LENGTHS},
    **{f"1.3b-{length}": partial(_1300M, length) for length in LENGTHS},
    **{f"bert-{length}": partial(_BERT, length) for length in LENGTHS},
}

TOYS: dict[str, Callable[[], Size]] = {
    "350m": lambda: _reading(transformer.SCANNED.small, 128),
    "1.3b": lambda: _reading(transformer.UNROLLED.small, 128),
    "wide": lambda: _reading(transformer.SCANNED.small, 128),
    "resnet50": lambda: resnet.RESNET50.small,
    "vit-b": lambda: vit.VIT.small,
    "unet": lambda: unet.UNET.small,
    **{f"350m-{length}": lambda: _reading(transformer.SCANNED.small, 128) for length in LENGTHS},
    **{f"1.3b-{length}": lambda: _reading(transformer.UNROLLED.small, 128) for length in LENGTHS},
    **{f"bert-{length}": lambda: encoder.ENCODER.small for length in LENGTHS},
}
