"""What `benchmarks.gpu_train` runs on a GPU that is lent for 25 minutes, and what that takes.

The seconds are guesses that keep a plan within its bounds: what was timed on an H200 for the 350M
and 1.3B models, ResNet-50 and ViT-B, else the time by the model of `jaxamp.compiled.roofline`.
"""

from __future__ import annotations

from collections.abc import Mapping

FLOAT = ("f32", "tf32")
HANDS = ("hand-bf16", "hand-fused")
EIGHT = ("amp-fp8", "amp-fp8-delayed")
CARRIED = "amp-fp8-carried"
HALF = (*HANDS, "amp-bf16", "amp-loss-bf16", "amp-f16")

PIECES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "350m": {"350m": (*FLOAT, *HALF, *EIGHT)},
    "large": {
        "wide": ("tf32", *HALF, *EIGHT, CARRIED),
        "1.3b": (*HANDS, "amp-bf16", *EIGHT),
    },
    "images": {"resnet50": (*FLOAT, *HALF), "unet": (*FLOAT, *HALF)},
    "patches": {"vit-b": (*FLOAT, *HALF, *EIGHT)},
    "bert": {
        "bert-512": (*FLOAT, *HALF, *EIGHT),
        "bert-8192": (*HANDS, "amp-bf16"),
    },
}
"""Each is one call of at most `CALL` seconds. Convolutions have no products in FP8."""

ATTENTION = ("hand-fused", "amp-bf16", "amp-bf16-composed")
LONGER: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "words-350m": {f"350m-{length}": ATTENTION for length in (512, 2048, 8192)},
    "words-1.3b": {f"1.3b-{length}": ATTENTION for length in (512, 2048, 8192)},
    "words-bert": dict.fromkeys(("bert-512", "bert-2048", "bert-8192", "vit-b"), ATTENTION),
}
"""What fused attention is worth as sequences grow: calls as long as those, made where asked for."""

EVERY = {**PIECES, **LONGER}

SIXTEEN = ("hand-bf16", "amp-bf16", "amp-f16")
FOLLOWED: Mapping[str, tuple[str, ...]] = {
    "350m": SIXTEEN,
    "wide": ("amp-bf16", "amp-fp8", CARRIED),
    "resnet50": SIXTEEN,
    "unet": SIXTEEN,
    "vit-b": (*SIXTEEN, "amp-fp8"),
    "bert-512": ("amp-bf16", "amp-fp8"),
}
"""The ways whose loss is followed over all steps; that of others over ten."""

CALL, WHOLE = 9 * 60, 25 * 60
STEPS, ROUNDS, ROUND = 200, 4, 0.5
"""Steps of a way whose loss is followed; how often each way is timed, and for how many seconds."""

_COMPILING = {
    "f32": 40.0,  # the first program of a process, whose products are all tuned
    "amp-fp8-delayed": 20.0,  # what makes its history, too
    CARRIED: 30.0,  # and steps that find no magnitudes
}
_STEP = {
    "350m": 0.17, "1.3b": 0.20, "wide": 0.13, "resnet50": 0.022, "vit-b": 0.05, "unet": 0.02,
    "bert-512": 0.06, "bert-2048": 0.07, "bert-8192": 0.11,
    "350m-512": 0.17, "350m-2048": 0.19, "350m-8192": 0.35,
    "1.3b-512": 0.20, "1.3b-2048": 0.22, "1.3b-8192": 0.40,
}  # fmt: skip
_OTHERS = 15.0  # to start a process, and to read its first batch


def is_followed(model: str, way: str) -> bool:
    """Whether the loss of a way is followed over all steps."""
    return way in FOLLOWED.get(model, ())


def seconds(piece: str) -> float:
    """How long a piece is expected to take."""
    return sum(_seconds_of(model, ways) for model, ways in EVERY[piece].items())


def _seconds_of(model: str, ways: tuple[str, ...]) -> float:
    step = _STEP[model]
    total = _OTHERS
    for way in ways:
        slower = {"f32": 7, "tf32": 2}.get(way, 1)
        total += _COMPILING.get(way, 10.0)
        total += ROUNDS * (ROUND + 6 * slower * step)  # warm steps, and at least three timed ones
        total += STEPS * step if is_followed(model, way) else 0
    return total
