"""Register the screen of each value: at a terminal, as a page, in a notebook."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group

from jaxamp.display.explanation import show_explanation
from jaxamp.display.page import in_frame, report_page
from jaxamp.display.tables import show_difference, show_estimate, show_probe, show_tuning
from jaxamp.display.terminal import show_lowering, show_report
from jaxamp.inspect.diff import Difference
from jaxamp.inspect.explain import Explanation
from jaxamp.inspect.fp8_products import Lowering
from jaxamp.inspect.report import Report
from jaxamp.numerics.probe_report import ProbeReport
from jaxamp.tools.estimate import Estimate
from jaxamp.tools.tune import Tuning

_WIDTH, _PROBE_WIDTH = 120, 140  # columns of text and pages; a probe has more of them
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


@functools.singledispatch
def parts(value: Any) -> Iterator[Any]:
    """Yield what rich prints one below the other."""
    raise NotImplementedError(f"{type(value).__name__} has no screen")


@functools.singledispatch
def page(value: Any) -> str:
    """Return one self-contained HTML page."""
    return _html(value, _PAGE)


@functools.singledispatch
def notebook(value: Any) -> str:
    """Return the HTML that a notebook shows below a cell."""
    return _html(value, _FRAGMENT)


parts.register(Difference, show_difference)
parts.register(Estimate, show_estimate)
parts.register(Explanation, show_explanation)
parts.register(Lowering, show_lowering)
parts.register(ProbeReport, show_probe)
parts.register(Report, show_report)
parts.register(Tuning, show_tuning)
page.register(Report, report_page)
notebook.register(Report, lambda report: in_frame(report_page(report)))


def terminal(value: Any) -> Group:
    """Return what rich prints."""
    return Group(*parts(value))


def text(value: Any) -> str:
    """Return what a terminal shows, without colours."""
    width = _PROBE_WIDTH if isinstance(value, ProbeReport) else _WIDTH
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, legacy_windows=False).print(value)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _html(value: Any, fragment: str) -> str:
    """Return what a terminal shows as HTML; text has no colour, to suit any theme."""
    console = Console(file=io.StringIO(), width=_WIDTH, record=True, force_terminal=True)
    console.print(value)
    return console.export_html(inline_styles=True, code_format=fragment)
