"""The models: each as a user writes it in float32, and as an expert writes it in bfloat16."""

from benchmarks.deviceless.models import lstm, resnet, transformer, vit
from benchmarks.deviceless.models.model import Model as Model

MODELS: dict[str, Model] = {
    model.name: model
    for model in (transformer.UNROLLED, transformer.SCANNED, resnet.RESNET50, vit.VIT, lstm.LSTM)
}
