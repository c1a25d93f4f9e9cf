"""Text that every Python ships, as tokens: the sources of its standard library, byte by byte."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

_BYTES = 2**22


@functools.cache
def text() -> np.ndarray:
    """The first four million bytes of the standard library's modules, in the order of names."""
    folder = Path(sysconfig.get_path("stdlib"))
    whole = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return np.frombuffer(whole[:_BYTES], np.uint8)


def sequences(key: jax.Array, batch: int, length: int, vocabulary: int) -> jax.Array:
    """Draw passages of the text: int32 of shape [batch, length], below the vocabulary."""
    source = jnp.asarray(np.minimum(text().astype(np.int32), vocabulary - 1))
    starts = jax.random.randint(key, (batch, 1), 0, source.size - length)
    return source[starts + jnp.arange(length)]
