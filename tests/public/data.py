"""Small synthetic data, deterministic: enough that a loss falls."""

from __future__ import annotations

import numpy as np

STEPS = 4


def rng(seed: int = 0) -> np.random.Generator:
    """A generator with a fixed seed."""
    return np.random.default_rng(seed)


def images(count: int = 8, size: int = 12, channels: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Stripes of four kinds with noise, f32[count, size, size, channels], and their kinds."""
    draw = rng()
    labels = draw.integers(0, 4, count)
    wave = np.sin(np.arange(size) * (labels[:, None] + 1) * 0.7)[:, :, None, None]
    noise = draw.normal(size=(count, size, size, channels))
    return (wave + 0.3 * noise).astype(np.float32), labels.astype(np.int32)


def sentences(count: int = 8, length: int = 12, words: int = 32) -> np.ndarray:
    """Rows of words that follow a rule with noise, i32[count, length]."""
    draw = rng(1)
    start, pace = draw.integers(1, words, (count, 1)), draw.integers(1, 4, (count, 1))
    rows = (start + pace * np.arange(length)) % (words - 1) + 1
    return np.where(draw.random(rows.shape) < 0.1, 1, rows).astype(np.int32)


def points(count: int = 64, width: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Points and a smooth function of them, f32[count, width] and f32[count, 1]."""
    x = rng(2).uniform(-1, 1, (count, width)).astype(np.float32)
    return x, np.sin(3 * x.sum(1, keepdims=True)).astype(np.float32)
