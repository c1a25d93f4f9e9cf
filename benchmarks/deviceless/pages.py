"""The tables against the strongest hand, and the picture of the home page, from kept figures.

    python -m benchmarks.deviceless.pages [FILE ...]

Figures of the files, such as ``python -m benchmarks.deviceless --json FILE`` writes, are put into
docs/h200_fused.json first, program by program. The pages say around their tables with which
command, when and on which JAX the figures were made.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.deviceless.models.fused import FUSED
from benchmarks.deviceless.models.model import HAND
from benchmarks.deviceless.variants import FUSED_ORDERS, ORDERS, PLAIN

Rows = Sequence[dict[str, Any]]
ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs/h200_fused.json"
PICTURE = ROOT / "docs/pictures/gain.svg"
_DRAWN = {
    "transformer": "transformer",
    "vit": "ViT",
    "encoder": "encoder",
    "equinox": "equinox",
    "haiku": "haiku",
}
_BARS = (
    (PLAIN, "#9aa0ac", "float32"),
    (FUSED, "#e0a030", "bfloat16 by hand"),
    (FUSED_ORDERS[0], "#4f6bd8", "amp"),
)
BEGIN, END = "<!-- strongest hand -->\n", "<!-- end of strongest hand -->"
TITLES = {
    "transformer": "transformer, layers written out",
    "scanned": "the same, scanned, with checkpoint",
    "vit": "ViT (flax)",
    "encoder": "encoder (flax nnx)",
    "equinox": "equinox",
    "haiku": "haiku",
}
_KEYS = "bytes", "temporary", "kernels"


def brief(rows: Rows) -> str:
    """Return the table of README.md: bytes and memory in both orders.

    Args:
      rows: the figures.
    """
    head = [f"`{order}`, {what}" for order in ORDERS for what in ("bytes", "memory")]
    lines = [f"| model | {' | '.join(head)} |", "|---|---|---|---|---|"]
    for model, title in TITLES.items():
        ratios = [
            f"{r['bytes']:.2f} × | {r['temporary']:.2f} ×" for _, r in _against(rows, model, FUSED)
        ]
        lines.append(f"| {title} | {' | '.join(ratios)} |")
    return "\n".join(lines) + "\n"


def whole(rows: Rows) -> str:
    """Return the table of docs/performance.md: in brackets against XLA's attention.

    Args:
      rows: the figures.
    """
    lines = [
        "| model | order | bytes moved | temporary memory | kernels |",
        "|---|---|---|---|---|",
    ]
    for model, title in TITLES.items():
        pairs = zip(_against(rows, model, FUSED), _against(rows, model, HAND), strict=True)
        for (order, ratios), (_, others) in pairs:
            cells = [f"{ratios[key]:.3f} ({others[key]:.3f})" for key in _KEYS]
            lines.append(f"| {title} | `{order}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(text: str, table: str) -> str:
    """Return a page's text with a table between its marks.

    Args:
      text: of the page.
      table: what is put there.
    """
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table + END + rest.partition(END)[2]


def picture(rows: Rows) -> str:
    """Return bytes moved and temporary memory relative to float32 as an SVG.

    Its greys are read on light and dark pages.

    Args:
      rows: the figures, those of float32 among them.
    """
    found = {(row["model"], row["variant"]): row for row in rows}
    parts = []
    for column, (key, title) in enumerate(
        (("bytes", "bytes moved"), ("temporary", "temporary memory"))
    ):
        left = 84 + 196 * column
        parts.append(f'<text x="{left}" y="16" font-weight="600">{title}</text>')
        for row, (model, name) in enumerate(_DRAWN.items()):
            top = 30 + 44 * row
            if not column:
                parts.append(f'<text x="76" y="{top + 22}" text-anchor="end">{name}</text>')
            for bar, (variant, colour, _) in enumerate(_BARS):
                share = found[model, variant][key] / found[model, PLAIN][key]
                y, width = top + 12 * bar, 150 * share
                box = f'x="{left}" y="{y}" width="{width:.1f}" height="10"'
                parts.append(f'<rect {box} fill="{colour}"/>')
                end = f'x="{left + width + 5:.1f}" y="{y + 9}" font-size="10"'
                parts.append(f"<text {end}>{share:.2f}</text>")
    for index, (_, colour, name) in enumerate(_BARS):
        x = 84 + 140 * index
        parts.append(f'<rect x="{x}" y="256" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="266">{name}</text>')
    style = 'font-family="sans-serif" font-size="12" fill="#7d8597"'
    size = 'width="470" viewBox="0 0 470 276" role="img"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>'
    label = "<title>Five models on an H200, relative to float32; shorter is better</title>"
    return "\n".join([head, label, *parts, "</svg>", ""])


TABLES = {ROOT / "README.md": brief, ROOT / "docs/performance.md": whole}
"""What each page has."""


def _against(rows: Rows, model: str, hand: str) -> Iterator[tuple[str, dict[str, float]]]:
    found = {row["variant"]: row for row in rows if row["model"] == model}
    for order, ours in zip(ORDERS, FUSED_ORDERS, strict=True):
        yield order, {key: found[ours][key] / found[hand][key] for key in _KEYS}


def _kept(rows: Rows, files: Sequence[str]) -> Rows:
    """Return the rows with those of the files in place of older ones of the same program."""
    found = {(row["model"], row["variant"]): row for row in rows}
    wanted = {PLAIN, HAND, FUSED, *FUSED_ORDERS}
    for file in files:
        for row in json.loads(Path(file).read_text()):
            if row["model"] in TITLES and row["variant"] in wanted:
                kept = ("target", "model", "variant", *_KEYS)
                found[row["model"], row["variant"]] = {key: row[key] for key in kept}
    return list(found.values())


def main(argv: Sequence[str] | None = None) -> None:
    """Keep the figures and write the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.deviceless.pages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="figures to put in")
    options = parser.parse_args(argv)
    known = json.loads(FIGURES.read_text()) if FIGURES.exists() else []
    rows = _kept(known, options.files)
    FIGURES.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    for page, table in TABLES.items():
        page.write_text(with_table(page.read_text(), table(rows)))
    PICTURE.write_text(picture(rows))


if __name__ == "__main__":
    main()
