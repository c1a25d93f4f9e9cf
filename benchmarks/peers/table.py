"""The peers' figures as README's table and as a picture."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
BEGIN, END = "<!-- peers -->", "<!-- /peers -->"
PROGRAMS = ("block", "scanned", "whitened", "module")


def write(figures: Figures, root: Path) -> None:
    """Writes the table between README's marks, and the picture."""
    readme = root / "README.md"
    text = readme.read_text()
    if BEGIN in text:
        table = f"{BEGIN}\n{markdown(figures)}\n{END}"
        readme.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: table, text, flags=re.DOTALL))
    picture(figures, root / "docs/pictures/peers.png")


def markdown(figures: Figures) -> str:
    """A row for each peer. Ratios are to float32 of the same program."""
    head = [
        "| | lines | block | scanned | Cholesky | flax | grad. error | bytes | memory | kernels |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(
        [*head, *(_row(name, row, figures["float32"]) for name, row in figures.items())]
    )


def _row(name: str, row: Figures, base: Figures) -> str:
    runs = [_runs(row.get(program)) for program in PROGRAMS]
    program = "block" if "block" in row else "module"
    found = row.get(program, {})
    error = found.get("error_of_gradient", math.nan)
    ratios = [
        _ratio(found, base.get(program, {}), key) for key in ("bytes", "temporary", "kernels")
    ]
    words = "" if math.isnan(error) else f"{100 * error:.2g} %"
    return f"| {name} | {row['lines']} | {' | '.join(runs)} | {words} | {' | '.join(ratios)} |"


def _runs(found: Figures | None) -> str:
    if found is None:
        return "–"
    if "error" in found:
        return "fails"
    return "yes" if found["finite"] else "not finite"


def _ratio(found: Figures, base: Figures, key: str) -> str:
    ours, theirs = found.get("h200") or {}, base.get("h200") or {}
    return f"{ours[key] / theirs[key]:.2f}" if key in ours and theirs.get(key) else ""


def picture(figures: Figures, path: Path) -> None:
    """Bytes as bars, with the gradient's error beside them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars = []
    for program, word in (("block", "functions"), ("module", "flax modules")):
        for name, row in figures.items():
            found = row.get(program, {})
            ratio = _ratio(found, figures["float32"].get(program, {}), "bytes")
            if ratio:
                bars.append((f"{name}, {word}", float(ratio), found["error_of_gradient"]))
    figure, axes = plt.subplots(figsize=(7.5, 0.34 * len(bars) + 0.9))
    for place, (name, ratio, error) in enumerate(bars):
        axes.barh(place, ratio, color="#3b6fb6" if name.startswith("jaxamp,") else "#b9c4d4")
        axes.text(ratio + 0.01, place, f"{ratio:.2f}, error {100 * error:.2g} %", va="center")
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.set(xlim=(0, 1.4), xlabel="bytes moved on an H200, as a part of float32's")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
