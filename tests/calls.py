"""Calls of jaxamp's own functions, counted and interrupted."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxamp

OURS = str(Path(jaxamp.__file__).parent)


def entered(call: Callable[[], Any], *, until: int = -1) -> int:
    """Make `call`; how many functions jaxamp entered, interrupted from number `until` on."""
    count = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(OURS):
            return
        count += 1
        # A generator is entered once more when it is dropped, where nobody can raise.
        if 0 < until <= count and not code.co_flags & inspect.CO_GENERATOR:
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count
