"""Base of values with a screen: as text, in a notebook, as a page. Screens are in `display/`."""

from __future__ import annotations

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

    def to_json(self) -> str:
        """Return everything as JSON."""
        raise NotImplementedError

    def save(self, path: str | Path) -> None:
        """Write the page, or JSON if the path ends in ``.json``."""
        path = Path(path)
        path.write_text(self.to_json() if path.suffix == ".json" else self.to_html())
