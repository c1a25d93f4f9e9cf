"""What `benchmarks.on_a_gpu` measured, as a table on docs/performance.md and as a picture.

    python -m benchmarks.gpu_report

The picture has the speed of each way of a model, relative to its strongest hand, and its memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.on_a_gpu import ROWS, table

FIGURES, PAGE = Path("docs/gpu_train.json"), Path("docs/performance.md")
PICTURE = Path("docs/pictures/gpu_train.png")
BEGIN, END = "<!-- on an H200 -->", "<!-- end of on an H200 -->"
AMP, HAND = "#3b6fb6", "#b9c4d4"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the speed of each way beside the strongest hand's, and what it needs of memory.

    Args:
      rows: of the file that the benchmark writes.
      path: where the picture goes.
    """
    timed = {(row["model"], row["way"]): row for row in rows}
    asked = [(model, way) for model, ways in ROWS.items() for way in ways if (model, way) in timed]
    figure, axes = plt.subplots(figsize=(8, 0.26 * len(asked) + 0.8))
    for place, (model, way) in enumerate(asked):
        row, hand = timed[model, way], timed[model, ROWS[model][0]]
        speed = hand["ms"] / row["ms"]
        axes.barh(place, speed, color=AMP if way.startswith("amp") else HAND)
        words = f"{speed:.2f}, {row['peak_bytes'] / 2**30:.1f} GiB"
        axes.text(speed + 0.01, place, words, va="center", fontsize=8)
    names = [f"{model}  {way}" for model, way in asked]
    axes.set_yticks(range(len(asked)), names, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="#555555", lw=0.8, ls=":")
    axes.set(xlabel="speed relative to the strongest hand (label: peak memory)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    """Put the table on its page, and draw."""
    rows = json.loads(FIGURES.read_text())
    before, _, rest = PAGE.read_text().partition(BEGIN)
    shown = "\n".join(table(rows))
    PAGE.write_text(f"{before}{BEGIN}\n{shown}\n{END}{rest.partition(END)[2]}")
    draw(rows, PICTURE)


if __name__ == "__main__":
    main()
