"""The release of JAX, and what depends on it and on the packages that are installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax

from jaxamp.errors import NEWEST_JAX

JAX = jax.__version_info__[:2]


def note_release(error: Exception) -> None:
    """Add a note to an error that a JAX newer than those of the tests may have caused."""
    changed = isinstance(error, AttributeError | KeyError | NotImplementedError | TypeError)
    if changed and tuple(map(int, NEWEST_JAX.split("."))) < JAX:
        error.add_note(
            f"This is JAX {jax.__version__}, and jaxamp is tested up to JAX {NEWEST_JAX}: if the "
            "function runs without amp, install that JAX or a newer jaxamp."
        )


def has_module(name: str) -> bool:
    """Return whether a package is installed that JAX needs without declaring it."""
    return find_spec(name) is not None


def is_gpu_interpreter(params: Any) -> bool:
    """Return whether `params` are Mosaic GPU's interpreter parameters, public since JAX 0.11."""
    return type(params).__name__ == "InterpretGPUParams"


def indexed_for_load(ref: Any, index: Any) -> tuple[Any, ...]:
    """Return the arguments that ``plgpu.load`` takes for a part of a Ref."""
    return (ref.at[index],) if JAX >= (0, 11) else (ref, index)  # 0.11 put the index first
