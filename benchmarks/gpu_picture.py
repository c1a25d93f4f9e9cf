"""Draws what `benchmarks.gpu_train` measured.

    python -m benchmarks.gpu_picture out/gpu_train.json docs/pictures/gpu_train.png

Throughput of each way, as a part of that of bfloat16 by hand, and the losses of one model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

BY_HAND = "hand-bf16"
LOSSES = "vit-b"  # the model whose losses are drawn


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the picture.

    Args:
      rows: of the file that the benchmark writes; those with errors are left out.
      path: where the picture goes.
    """
    rows = [row for row in rows if "error" not in row]
    figure, (bars, lines) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3, 2))
    _throughputs(rows, bars)
    for row in rows:
        if row["model"] == LOSSES:
            lines.plot(row["losses"], label=row["way"], lw=1.2)
    lines.set(xlabel=f"step of {LOSSES}", ylabel="loss")
    lines.legend(frameon=False, fontsize=8)
    for axes in (bars, lines):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def _throughputs(rows: Sequence[dict[str, Any]], axes: Axes) -> None:
    base = {row["model"]: row["items_per_second"] for row in rows if row["way"] == BY_HAND}
    shown = [row for row in rows if row["model"] in base]
    for place, row in enumerate(shown):
        ratio, gibibytes = row["items_per_second"] / base[row["model"]], row["peak_bytes"] or 0
        axes.barh(place, ratio, color="#3b6fb6" if row["way"].startswith("amp") else "#b9c4d4")
        words = f"{ratio:.2f}, {gibibytes / 2**30:.1f} GiB"
        axes.text(ratio + 0.01, place, words, va="center", fontsize=8)
    names = [f"{row['model']}  {row['way']}" for row in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.35), xlabel="throughput as a part of that by hand, and peak memory")


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    draw(json.loads(source.read_text()), target)
