"""Register the screen of each value: at a terminal, as a page, in a notebook."""

from __future__ import annotations

import contextlib
import html
import importlib
import io
from collections.abc import Iterable
from typing import Any

from jaxamp.display.explanation import explanation_lines
from jaxamp.display.lines import cut, plain
from jaxamp.display.page import PAGES, in_frame, report_page
from jaxamp.display.summary import report_lines
from jaxamp.errors import InspectionError
from jaxamp.inspect.diff import Difference
from jaxamp.inspect.displayable import Displayable
from jaxamp.inspect.explain import Explanation
from jaxamp.inspect.report import Report
from jaxamp.numerics.probe_report import ProbeReport
from jaxamp.tools.estimate import Estimate
from jaxamp.tools.tune import Tuning

_WIDTH, _PROBE_WIDTH = 120, 140  # columns of text and pages; a probe has more of them
_FRAGMENT = '<pre style="line-height: 1.2; overflow-x: auto">{code}</pre>'


def needed(name: str) -> Any:
    """Import a module that needs rich or jinja2.

    Raises:
      InspectionError: one is not installed; the sentence says how to install both.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in ("rich", "jinja2"):
            raise
        raise InspectionError(
            f"Tables and pages are drawn with {package}, which is not installed: pip install "
            "'jax-mixed-precision[report]'. The first screens of report and explain, and "
            "to_json(), need nothing else."
        ) from None


_TABLES = {
    Difference: "show_difference",
    Estimate: "show_estimate",
    ProbeReport: "show_probe",
    Report: "show_report",
    Tuning: "show_tuning",
}
"""Functions of `tables.py`, which needs rich."""


def parts(value: Any) -> Iterable[Any]:
    """Return what is printed one below the other: lines, or what rich renders."""
    kind = type(value)
    if kind is Explanation:
        return explanation_lines(value)
    if kind is Report and not value.everything:
        return report_lines(value)
    if kind in _TABLES:
        return getattr(needed("jaxamp.display.tables"), _TABLES[kind])(value)
    if kind.__rich__ is not Displayable.__rich__:
        return [value]
    return [(line,) for line in value.lines]


def page(value: Any) -> str:
    """Return one self-contained HTML page."""
    if isinstance(value, Report):
        return needed("jinja2") and report_page(value)
    return _html(value, (PAGES / "screen.html").read_text())


def notebook(value: Any) -> str:
    """Return the HTML that a notebook shows below a cell."""
    if isinstance(value, Report):
        with contextlib.suppress(InspectionError):  # without jinja2 it is the first screen
            return in_frame(page(value))
    return _html(value, _FRAGMENT)


def terminal(value: Any) -> Any:
    """Return what rich prints."""
    from rich.console import Group
    from rich.text import Text

    whole = getattr(value, "everything", True)
    words: dict[str, Any] = {} if whole else {"no_wrap": True, "overflow": "ellipsis"}
    found = parts(value)
    return Group(*(Text.assemble(*p, **words) if isinstance(p, tuple) else p for p in found))


def text(value: Any) -> str:
    """Return what a terminal shows, without colours."""
    found = list(parts(value))
    if all(isinstance(part, tuple) for part in found):
        whole = getattr(value, "everything", True)
        return "\n".join(plain(line if whole else cut(line, _WIDTH)) for line in found)
    width = _PROBE_WIDTH if isinstance(value, ProbeReport) else _WIDTH
    console, file = _console(width)
    console.print(value)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _html(value: Any, fragment: str) -> str:
    """Return what a terminal shows as HTML; text has no colour, to suit any theme."""
    try:
        console, _ = _console(_WIDTH, record=True, force_terminal=True)
    except InspectionError:
        return fragment.format(code=html.escape(text(value)))
    console.print(value)
    return console.export_html(inline_styles=True, code_format=fragment)


def _console(width: int, **words: Any) -> tuple[Any, io.StringIO]:
    file = io.StringIO()
    made = needed("rich.console").Console(
        file=file,
        width=width,
        color_system="auto" if words else None,
        legacy_windows=False,
        **words,
    )
    return made, file
