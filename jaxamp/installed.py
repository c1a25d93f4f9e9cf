"""The features that contribute to the core: the one place that names them, and registers them.

Each is a folder with a file `feature.py`, and can be taken away. So can the others, which read
plans, or use what is public: nothing registers them.
"""

from __future__ import annotations

import importlib

from jaxamp.core.features import register, register_words
from jaxamp.policy.presets import enter_presets

CONTRIBUTING = {
    "cancellation": (),
    "found": ("fused_attention", "loss_in_chunks"),
    "modules": (),
    "quantized": (
        "scaling", "Scaling", "fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4",
        "FP8_CURRENT", "FP8_DELAYED", "FP8_BLOCK", "MXFP8", "NVFP4",
        "f8_e4m3", "f8_e5m2", "f4_e2m1",
    ),
    "xla": ("xla",),
    "display": (),
}  # fmt: skip
"""Features that contribute, and the words of policies that need them."""


def enter() -> None:
    """Register the features that are here, and the words of all."""
    for name, words in CONTRIBUTING.items():
        register_words(name, words)
    for name in CONTRIBUTING:
        try:
            feature = importlib.import_module(f"jaxamp.{name}.feature").FEATURE
        except ModuleNotFoundError as error:
            if error.name != f"jaxamp.{name}":
                raise
            continue
        register(feature)
        enter_presets(feature.presets())
