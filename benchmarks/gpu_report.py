"""What `benchmarks.gpu_train` measured, as tables in Markdown and as a picture.

    python -m benchmarks.gpu_report docs/gpu_train.json docs/pictures/gpu_train.png

It prints the table of docs/lab-notebook.md. The picture has the throughput of each way of models
that have hand-written bfloat16, relative to that, and the losses of one model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

BY_HAND = "hand-bf16"
FUSED = "hand-fused"
LABEL = "throughput relative to hand-written bf16 (label: peak memory)"
LOSSES = "vit-b"  # the model whose losses are drawn


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of the table in docs/lab-notebook.md.

    Args:
      rows: of the file that the benchmark writes.
    """
    hands = [_of_way(rows, way) for way in (FUSED, BY_HAND)]
    return "\n".join(
        f"| {row['model']} | {row['way']} | {row['items_per_second']:,.0f}{_spread(row)} "
        f"| {' | '.join(_ratio(row, base) for base in hands)} | {row['peak_bytes'] / 2**30:.1f} "
        f"| {row['tracing_seconds'] + row['compiling_seconds']:.1f} | {row['steps']} "
        f"| {row['last_loss']:.3f} |"
        for row in rows
    )


def _spread(row: dict[str, Any]) -> str:
    """Half of what lies between the slowest round and the fastest; nothing where there was one."""
    return f" ± {50 * row['spread']:.1f} %" if len(row.get("rounds", ())) > 1 else ""


def _ratio(row: dict[str, Any], base: dict[str, float]) -> str:
    hand = base.get(row["model"])
    return f"{row['items_per_second'] / hand:.2f}" if hand else "–"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the picture.

    Args:
      rows: of the file that the benchmark writes.
      path: where the picture goes.
    """
    base = _of_way(rows, BY_HAND)
    shown = [row for row in rows if row["model"] in base]
    size = 11, max(4.2, 0.2 * len(shown))
    figure, (bars, lines) = plt.subplots(1, 2, figsize=size, width_ratios=(3, 2))
    _throughputs(shown, base, bars)
    drawn = [row for row in rows if row["model"] == LOSSES]
    for place, row in enumerate(drawn):  # they lie on each other: the widest is drawn first
        lines.plot(row["losses"], label=row["way"], lw=1 + 2.5 * (len(drawn) - 1 - place))
    lines.set(xlabel=f"step of {LOSSES}", ylabel="loss")
    lines.legend(frameon=False, fontsize=8)
    for axes in (bars, lines):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def _throughputs(rows: Sequence[dict[str, Any]], base: dict[str, float], axes: Axes) -> None:
    for place, row in enumerate(rows):
        ratio = row["items_per_second"] / base[row["model"]]
        axes.barh(place, ratio, color="#3b6fb6" if row["way"].startswith("amp") else "#b9c4d4")
        words = f"{ratio:.2f}, {row['peak_bytes'] / 2**30:.1f} GiB"
        axes.text(ratio + 0.01, place, words, va="center", fontsize=8)
    names = [f"{row['model']}  {row['way']}" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.35), xlabel=LABEL)


def _of_way(rows: Sequence[dict[str, Any]], way: str) -> dict[str, float]:
    return {row["model"]: row["items_per_second"] for row in rows if row["way"] == way}


def main(argv: Sequence[str] | None = None) -> None:
    """Print and draw."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("figures", type=Path, help="what benchmarks.gpu_train has written")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args(argv)
    rows = [row for row in json.loads(options.figures.read_text()) if "error" not in row]
    rows = [row for row in rows if "items_per_second" in row]  # those compiled, but cut before
    print(table(rows))
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
