"""What has a picture for the terminal has one for text, for notebooks and as a page too."""

from __future__ import annotations

from typing import Any

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>jaxamp</title>
</head>
<body>
<pre style="line-height: 1.2">{code}</pre>
</body>
</html>
"""
_FRAGMENT = '<pre style="line-height: 1.2; overflow-x: auto">{code}</pre>'


class Shown:
    """Base of values with a ``__rich__`` method: ``print`` and notebooks show the same.

    >>> class Greeting(Shown):
    ...     def __rich__(self):
    ...         return "[bold]hello"
    >>> print(Greeting())
    hello
    """

    __slots__ = ()

    def __rich__(self) -> Any:
        """What a terminal shows."""
        raise NotImplementedError

    def __str__(self) -> str:
        from jaxamp.display.terminal import as_text  # rich only where it is needed

        return as_text(self)

    def to_html(self) -> str:
        """One page that needs nothing else."""
        from jaxamp.display.terminal import as_html

        return as_html(self, _PAGE)

    def _repr_html_(self) -> str:
        from jaxamp.display.terminal import as_html

        return as_html(self, _FRAGMENT)
