"""The feature: hints to XLA beside the precisions, so that it fuses and stores as planned."""

from __future__ import annotations

from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxamp.core.enum_words import chosen
from jaxamp.core.features import Feature, PolicyField, Replaced, Work
from jaxamp.xla.hints.techniques import ALL_TECHNIQUES, Technique


def _work() -> Work:
    from jaxamp.xla.hints.steer import steer
    from jaxamp.xla.relu_masks import compare_relu_results
    from jaxamp.xla.steering_emitter import SteeringEmitter

    def masks(closed: ClosedJaxpr, policy: Any) -> Replaced:
        return Replaced(compare_relu_results(closed))

    return Work(replace=(masks,), steer=steer, emitter=SteeringEmitter)


_FIELD = PolicyField(
    name="xla", default=ALL_TECHNIQUES, read=lambda given, present: chosen(Technique, given)
)
FEATURE = Feature(name="xla", fields=(_FIELD,), work=_work)
