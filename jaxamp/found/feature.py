"""The feature: attention as one equation, for which there are kernels, and losses in chunks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxamp.core.features import Feature, PolicyField, Work
from jaxamp.errors import PolicyError
from jaxamp.policy.rules import Rule

# cuDNN's calls are named fmha or dot_product_attention by XLA, Pallas' are compiled by Mosaic.
_KERNELS = re.compile(r"cudnn|fmha|attention|mosaic|pallas", re.IGNORECASE)


def _read(given: Any, present: Any) -> bool | None:
    if given is None or isinstance(given, bool):
        return given
    raise PolicyError(f"fused_attention is True, False or None, not {given!r}.")


def _read_chunks(given: Any, present: Any) -> Any:
    """Return a word, or pairs of a scope and a word of which the first that matches decides."""
    if given is None or isinstance(given, bool) or given == "memory":
        return given
    if isinstance(given, Mapping | list | tuple) and given:
        pairs = dict(given)
        for scope in pairs:
            Rule(precision="f32", scope=scope)  # refuses what can never match
        return tuple((scope, _read_chunks(word, None)) for scope, word in pairs.items())
    raise PolicyError(
        f"loss_in_chunks is True, False, 'memory' or None, not {given!r}; or such a word by scope: "
        "{'draft/head': 'memory', '*': None}."
    )


def _advise(error: Exception, plan: Callable[[], Any]) -> str:
    """Return where attention is fused and how to turn that off, if the error is of a kernel."""
    if not isinstance(error, jax.errors.JaxRuntimeError) or not _KERNELS.search(str(error)):
        return ""
    attentions = [a for a in plan().found if a.kind == "attention"]
    places = "; ".join(f"{a.scope or 'no scope'}, {a.source}" for a in attentions)
    if not places:
        return ""
    return (
        f"amp lowers attention to a fused kernel here: {places}. If the compiler refuses that "
        "kernel, policy.replace(fused_attention=False) leaves all attention as it is written, and "
        "Rule(primitive='attention_forward', scope='...', precision='f32') that of one scope."
    )


def _work() -> Work:
    from jaxamp.found.attention import fuse
    from jaxamp.found.cross_entropy import losses, worth
    from jaxamp.rewrite.rules.movement import move

    return Work(
        replace=(fuse.fuse_attention, losses.chunk_losses),
        kinds={
            fuse.KIND: "no softmax stands between two matrix products of one function",
            losses.KIND: f"no loss reads logits of {worth.MATTERS // 2**20} MiB or more",
        },
        elsewhere=fuse.fused_elsewhere,
        rules={"undivided": move},
        advise=_advise,
    )


FEATURE = Feature(
    name="found",
    fields=(
        PolicyField(name="fused_attention", default=None, read=_read),
        PolicyField(name="loss_in_chunks", default=None, read=_read_chunks),
    ),
    work=_work,
)
