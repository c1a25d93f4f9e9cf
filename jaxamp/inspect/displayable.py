"""Bases of results: as plain words and numbers, and on screens, which are in `display/`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxamp.core.features import absent, features
from jaxamp.errors import InspectionError


def _screens() -> Any:
    """Return the module with the functions of a value.

    ``terminal`` returns what rich prints, ``text`` the same without colours, ``page`` an HTML page
    that needs nothing else, ``notebook`` the HTML that a notebook shows below a cell.
    """
    screens = next((f.screens for f in features() if f.screens), None)
    if screens is None:
        raise InspectionError(f"{absent('A screen', 'display')}Ask for to_json().")
    return screens()


def plain(value: Any) -> Any:
    """Return what a value and the dataclasses in it hold as plain words and numbers."""
    return json.loads(json.dumps(value, default=_parts))


def _parts(value: Any) -> dict[str, Any]:
    if hasattr(value, "to_json") and not hasattr(value, "to_data"):  # a policy
        return json.loads(value.to_json())
    return value.to_data() if hasattr(value, "to_data") else dataclasses.asdict(value)


class Data:
    """Base of dataclasses that can be written down, all fields but those that no `repr` shows."""

    __slots__ = ()

    def to_data(self) -> dict[str, Any]:
        """Return everything as plain words and numbers."""
        fields: Any = dataclasses.fields(self)  # type: ignore[arg-type]
        found = {field.name: getattr(self, field.name) for field in fields if field.repr}
        if place := found.pop("place", None):
            found |= {**dataclasses.asdict(place), "text": place.text}
        return plain(found)

    def to_json(self) -> str:
        """Return everything as JSON; what is infinite or NaN is a word there."""
        data = json.dumps(self.to_data())
        words = json.loads(data, parse_constant=lambda constant: str(float(constant)))
        return json.dumps(words, indent=1)


class Displayable(Data):
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

    def __repr__(self) -> str:
        known = (getattr(self, name, "") for name in ("program", "policy", "target"))
        return f"<{' '.join(filter(None, (type(self).__name__, *map(str, known))))}; print it>"

    def to_html(self) -> str:
        """Return one page that needs nothing else."""
        return _screens().page(self)

    def _repr_html_(self) -> str:
        return _screens().notebook(self)

    def save(self, path: str | Path) -> None:
        """Write the page, or JSON if the path ends in ``.json``."""
        path = Path(path)
        path.write_text(self.to_json() if path.suffix == ".json" else self.to_html())
