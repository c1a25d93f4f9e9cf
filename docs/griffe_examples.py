"""Gives the doctests of docstrings the heading under which the site's build looks for them."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

# Paragraphs that begin with a prompt, one after another.
DOCTEST = re.compile(r"^>>> .*?(?=\n\n(?!>>> )|\Z)", re.DOTALL | re.MULTILINE)


class Examples(griffe.Extension):
    """Without a heading a `>>>` is a quotation in Markdown, and its output a link."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe calls this with every object."""
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(
                lambda found: "Examples:\n" + textwrap.indent(found[0], "  "), obj.docstring.value
            )
