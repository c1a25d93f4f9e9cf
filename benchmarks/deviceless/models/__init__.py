"""The models: each as a user writes it in float32, and as an expert writes it in bfloat16."""

from benchmarks.deviceless.models import (
    decoder,
    densenet,
    encoder,
    equinox_stack,
    experts,
    haiku_decoder,
    lstm,
    resnet,
    transformer,
    unet,
    vit,
)
from benchmarks.deviceless.models.model import Model as Model

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
    model.name: model for model in (encoder.ENCODER, equinox_stack.EQUINOX, haiku_decoder.HAIKU)
}
"""Models that attend by modules of packages that jaxamp has nothing to do with."""

EVERY = MODELS | PACKAGES | OTHERS
