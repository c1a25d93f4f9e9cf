"""What all programs are given: sizes, weights and words. Needs numpy alone."""

from __future__ import annotations

from typing import Any

import numpy as np

Sizes = dict[str, int]
SMALL: Sizes = {"batch": 4, "length": 32, "width": 64, "heads": 4, "layers": 2, "words": 64}
LARGE: Sizes = {"batch": 8, "length": 512, "width": 512, "heads": 8, "layers": 2, "words": 8192}


def make_params(size: Sizes, dtype: Any = np.float32) -> Any:
    """Weights of the transformer, those of its layers stacked."""
    rng, width, layers = np.random.default_rng(0), size["width"], size["layers"]

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(dtype)

    return {
        "embed": (rng.normal(size=(size["words"], width))).astype(dtype),
        "norm": np.ones(width, dtype),
        "layers": {
            "norm1": np.ones((layers, width), dtype),
            "norm2": np.ones((layers, width), dtype),
            "qkv": normal(layers, width, 3 * width),
            "out": normal(layers, width, width),
            "up": normal(layers, width, 4 * width),
            "down": normal(layers, 4 * width, width),
        },
    }


def make_words(size: Sizes) -> np.ndarray:
    """A batch of sentences."""
    return np.random.default_rng(1).integers(0, size["words"], (size["batch"], size["length"]))


def make_features(size: Sizes) -> np.ndarray:
    """A batch of sentences whose words are embedded already."""
    shape = size["batch"], size["length"], size["width"]
    return np.random.default_rng(2).normal(size=shape).astype(np.float32)
