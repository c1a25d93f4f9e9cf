"""Add notes to compilers' errors about fused attention kernels that no check foresaw."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax

from jaxamp.run.emit import plan_call
from jaxamp.run.settings import Settings, in_force
from jaxamp.trace.arguments import Signature

# cuDNN's calls are named fmha or dot_product_attention by XLA, Pallas' are compiled by Mosaic.
_KERNELS = re.compile(r"cudnn|fmha|attention|mosaic|pallas", re.IGNORECASE)


def note_attentions(
    error: Exception, signature: Signature, arrays: Sequence[Any], settings: Settings
) -> None:
    """Add a note to a compiler's error: where attention is fused, and how to turn that off.

    Args:
      error: what a compiled form raised.
      signature: the call without its arrays.
      arrays: those, or their shapes.
      settings: how it is rewritten.
    """
    if not isinstance(error, jax.errors.JaxRuntimeError) or not _KERNELS.search(str(error)):
        return
    try:
        plan, _ = plan_call(signature, arrays, in_force(settings))
    except Exception:  # the compiler's error is the one to be seen
        return
    if plan.attentions:
        places = "; ".join(f"{a.scope or 'no scope'}, {a.source}" for a in plan.attentions)
        error.add_note(
            f"amp lowers attention to a fused kernel here: {places}. If the compiler refuses that "
            "kernel, policy.replace(fused_attention=False) leaves all attention as it is written, "
            "and Rule(primitive='found_attention', scope='...', precision='f32') those of a scope."
        )
