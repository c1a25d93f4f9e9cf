"""Models that were written, and counted, before the planner was changed for any of them.

Each is one function of its activations' dtype: parameters follow it where they are used, statistics
and losses are float32. With float32 that is the program as its authors write it, where every such
cast vanishes; with bfloat16 it is the hand. What attends has a second hand, by cuDNN's kernel.
"""

from benchmarks.deviceless.models.model import Model
from benchmarks.deviceless.models.unseen import (
    diffusion,
    language,
    many_words,
    recurrences,
    routing,
    vision,
    words,
)

UNSEEN: dict[str, Model] = {
    model.name: model
    for model in (
        diffusion.DIT,
        recurrences.SSD,
        recurrences.RETNET,
        routing.RAGGED,
        routing.RECOMMENDER,
        routing.GRAPH,
        vision.CONVNEXT,
        vision.SWIN,
        vision.FIELD,
        words.SPEECH,
        words.LORA,
        words.DECODE,
        words.GENERATE,
        many_words.LLAMA,
        many_words.GEMMA,
        many_words.T5,
        many_words.BERT,
        language.QWEN,
        language.MAMBA,
        language.BART,
    )
}
"""The decode step has two rows without a gradient: one step, and a loop of them."""
