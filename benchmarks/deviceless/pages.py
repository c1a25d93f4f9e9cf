"""The table against the strongest hand, in README.md and docs/performance.md, from kept figures.

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
from benchmarks.deviceless.variants import FUSED_ORDERS, ORDERS

Rows = Sequence[dict[str, Any]]
ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs/h200_fused.json"
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


TABLES = {ROOT / "README.md": brief, ROOT / "docs/performance.md": whole}
"""What each page has."""


def _against(rows: Rows, model: str, hand: str) -> Iterator[tuple[str, dict[str, float]]]:
    found = {row["variant"]: row for row in rows if row["model"] == model}
    for order, ours in zip(ORDERS, FUSED_ORDERS, strict=True):
        yield order, {key: found[ours][key] / found[hand][key] for key in _KEYS}


def _kept(rows: Rows, files: Sequence[str]) -> Rows:
    """Return the rows with those of the files in place of older ones of the same program."""
    found = {(row["model"], row["variant"]): row for row in rows}
    wanted = {HAND, FUSED, *FUSED_ORDERS}
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


if __name__ == "__main__":
    main()
