"""The form of a history: what a step under delayed scaling takes and returns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxamp.errors import TrainingError

History = Mapping[str, Any]
MAGNITUDES = "amax"  # its key: a row per step, the last first, a column per tensor
CARRIED = "carried"  # its key: parameters in 8 bits
_KEY = re.compile(rf"{MAGNITUDES}|{CARRIED}|\d+:loop")


def is_history(value: Any) -> bool:
    """Return whether a value has the keys of a history."""
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and _KEY.fullmatch(key) for key in value
    )


def parts(history: History | None) -> tuple[History | None, History | None]:
    """Split a history, if there is one, into magnitudes and parameters in 8 bits."""
    if history is None:
        return None, None
    return {k: v for k, v in history.items() if k != CARRIED}, history.get(CARRIED, {})


def check(is_of_this_step: bool) -> None:
    """Raise unless what is read of a history is what this step has written."""
    if not is_of_this_step:
        raise TrainingError(
            "The history is not this step's: of another function, policy or constant argument, or "
            "of loops with another number of iterations. Make a new one with step.init(*args)."
        )
