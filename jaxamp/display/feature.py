"""The feature: screens of values. rich and jinja2 are imported when one is drawn."""

from __future__ import annotations

from typing import Any

from jaxamp.core.features import Feature


def _screens() -> Any:
    from jaxamp.display import screens

    return screens


FEATURE = Feature(name="display", screens=_screens)
