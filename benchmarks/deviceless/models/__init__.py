"""The models: each as a user writes it in float32, and as an expert writes it in bfloat16.

The one of haiku's modules is missing where haiku is.
"""

from importlib.util import find_spec

from benchmarks.deviceless.models import (
    decoder,
    densenet,
    encoder,
    equinox_stack,
    experts,
    lstm,
    resnet,
    transformer,
    unet,
    vit,
)
from benchmarks.deviceless.models.model import Model as Model
from benchmarks.deviceless.models.unseen import UNSEEN

MODELS: dict[str, Model] = {
    model.name: model
    for model in (transformer.UNROLLED, transformer.SCANNED, resnet.RESNET50, vit.VIT, lstm.LSTM)
}
OTHERS: dict[str, Model] = {
    model.name: model
    for model in (
        vit.PATCHES_196,
        decoder.DECODER,
        experts.EXPERTS,
        unet.UNET,
        densenet.DENSENET121,
    )
}
"""Models that came later than most of the planner; "all" does not stand for them."""

PACKAGES: dict[str, Model] = {
    model.name: model for model in (encoder.ENCODER, equinox_stack.EQUINOX)
}
if find_spec("haiku"):
    from benchmarks.deviceless.models import haiku_decoder

    PACKAGES["haiku"] = haiku_decoder.HAIKU
"""Models that attend by modules of packages that jaxamp has nothing to do with."""

EVERY = MODELS | PACKAGES | OTHERS | UNSEEN
