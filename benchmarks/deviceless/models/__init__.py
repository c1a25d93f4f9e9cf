"""The models: each as a user writes it in float32, and as an expert writes it in bfloat16."""

from benchmarks.deviceless.models import (
    decoder,
    encoder,
    experts,
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
    for model in (vit.PATCHES_196, decoder.DECODER, experts.EXPERTS, unet.UNET, encoder.ENCODER)
}
"""Models that came later than most of the planner; "all" does not stand for them."""

EVERY = MODELS | OTHERS
