"""Base of values with a screen: as text, in a notebook, as a page. Screens are in `display/`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from jaxamp.core.features import features, lacking
from jaxamp.errors import InspectionError


def _screens() -> Any:
    """Return the module with the functions of a value.

    ``terminal`` returns what rich prints, ``text`` the same without colours, ``page`` an HTML page
    that needs nothing else, ``notebook`` the HTML that a notebook shows below a cell.
    """
    screens = next((f.screens for f in features() if f.screens), None)
    if screens is None:
        raise InspectionError(f"A screen {lacking('display')}Ask for to_json().")
    return screens()


class Displayable:
    """Base of values that have a screen: ``print``, notebooks and pages show the same.

    A screen is a function of the value in ``jaxamp.display``, a ``__rich__`` of its own, or what it
    has as ``lines``.

    >>> class Greeting(Displayable):
    ...     def __rich__(self):
    ...         return "[bold]hello"
    >>> print(Greeting())
    hello
    """

    __slots__ = ()

    def __rich__(self) -> Any:
        """Return what rich prints."""
        return _screens().terminal(self)

    def __str__(self) -> str:
        return _screens().text(self)

    def to_html(self) -> str:
        """Return one page that needs nothing else."""
        return _screens().page(self)

    def _repr_html_(self) -> str:
        return _screens().notebook(self)

    def to_data(self) -> dict[str, Any]:
        """Return everything as plain words and numbers."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Return everything as JSON; what is infinite or NaN is a word there."""
        return json.dumps(_finite(self.to_data()), indent=1)

    def save(self, path: str | Path) -> None:
        """Write the page, or JSON if the path ends in ``.json``."""
        path = Path(path)
        path.write_text(self.to_json() if path.suffix == ".json" else self.to_html())


def _finite(value: Any) -> Any:
    """Return words for the numbers in plain data that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
