"""The peers' figures as the table of docs/peers.md and as a picture."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
BEGIN, END = "<!-- peers -->", "<!-- /peers -->"
# What is compiled, and error is taken of, stands for the others of its kind.
KINDS = {
    "functions": ("block", "scanned", "whitened"),
    "flax modules": ("flax",),
    "haliax modules": ("haliax",),
}
WORDS = {"block": "layers", "scanned": "scan", "whitened": "Cholesky"}
TARGETS = {"h200": "H200", "v5e": "v5e"}
SIZES = ("bytes", "temporary", "kernels")


def write(figures: Figures, root: Path) -> None:
    """Writes the table between the page's marks, and the picture."""
    page = root / "docs/peers.md"
    text = page.read_text()
    table = f"{BEGIN}\n{markdown(figures)}\n{END}"
    page.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: table, text, flags=re.DOTALL))
    picture(figures, root / "docs/pictures/peers.png")


def markdown(figures: Figures) -> str:
    """A row for each peer and kind of program. Ratios are to float32 of the same program."""
    head = (
        "| | lines | runs | grad. error | bytes | memory | kernels |\n|---|---|---|---|---|---|---|"
    )
    return "\n".join([head, *_rows(figures)])


def _rows(figures: Figures) -> Iterator[str]:
    for kind, programs in KINDS.items():
        yield f"| **{kind}** | | | | | | |"
        for name, row in figures.items():
            if not row.keys().isdisjoint(programs):
                yield _row(name, row, figures["float32"], programs)


def _row(name: str, row: Figures, base: Figures, programs: tuple[str, ...]) -> str:
    found, exact = row.get(programs[0], {}), base[programs[0]]
    ratios = [
        " / ".join(_ratio(found, exact, target, key) or "–" for target in TARGETS) for key in SIZES
    ]
    error = found.get("error_of_gradient", math.nan)
    words = "–" if math.isnan(error) else f"{100 * error:.2g} %"
    return f"| {name} | {row['lines']} | {_runs(row, programs)} | {words} | {' | '.join(ratios)} |"


def _runs(row: Figures, programs: tuple[str, ...]) -> str:
    words = [(WORDS.get(p, ""), _outcome(row.get(p))) for p in programs]
    if len({outcome for _, outcome in words}) == 1:
        return words[0][1]
    return ", ".join(f"{word}: {outcome}" for word, outcome in words)


def _outcome(found: Figures | None) -> str:
    if found is None:
        return "–"
    if "error" in found:
        return "fails"
    return "yes" if found["finite"] else "not finite"


def _ratio(found: Figures, base: Figures, target: str, key: str) -> str:
    ours, theirs = found.get(target) or {}, base.get(target) or {}
    return f"{ours[key] / theirs[key]:.2f}" if key in ours and theirs.get(key) else ""


def picture(figures: Figures, path: Path) -> None:
    """Bytes as bars, with the error beside them, for targets of which no figure is missing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = [target for target in TARGETS if all(bar[1] for bar in _bars(figures, target))]
    size = 5.5 * len(drawn), 5
    figure, panels = plt.subplots(1, len(drawn), figsize=size, squeeze=False, sharey=True)
    for axes, target in zip(panels[0], drawn, strict=True):
        bars = list(_bars(figures, target))
        for place, (name, ratio, error) in enumerate(bars):
            axes.barh(place, ratio, color="#3b6fb6" if name.startswith("jaxamp,") else "#b9c4d4")
            words = f"{ratio:.2f}, error {100 * error:.2g} %"
            axes.text(ratio + 0.02, place, words, va="center", fontsize=8)
        axes.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize=8)
        words = f"bytes moved, compiled for {TARGETS[target]}, relative to float32"
        axes.set(xlim=(0, 1.7), xlabel=words)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].invert_yaxis()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def _bars(figures: Figures, target: str) -> Iterator[tuple[str, float, float]]:
    """Of every row that was compiled for some target: its name, bytes and error."""
    for kind, programs in KINDS.items():
        for name, row in figures.items():
            found, base = row.get(programs[0], {}), figures["float32"][programs[0]]
            if any(_ratio(found, base, t, "bytes") for t in TARGETS):
                ratio = float(_ratio(found, base, target, "bytes") or 0)
                yield f"{name}, {kind}", ratio, found["error_of_gradient"]
