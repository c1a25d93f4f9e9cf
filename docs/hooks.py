"""What the site's build fills in: kinds, files of a folder, the output of the rewriting page."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from jaxamp.core.taxonomy import TABLE, OpKind, Trait

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:examples|benchmarks)/[^)]*)\)")
MODULES = re.compile(r"<!-- modules ([\w/]*) -->")
PACKAGE = Path(__file__).parents[1] / "jaxamp"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Mkdocs calls this with every page."""
    if "<!-- kinds -->" in markdown:
        markdown = markdown.replace("<!-- kinds -->", kinds())
    markdown = MODULES.sub(lambda mark: modules(PACKAGE / mark[1]), markdown)
    if "<!-- output:" in markdown:
        markdown = with_outputs(markdown)
    return OUTSIDE.sub(r"\1 (`\2`)", markdown)


def kinds() -> str:
    """A table for each kind: traits, and the primitives that have them."""
    parts = []
    for kind in OpKind:
        rows = defaultdict(list)
        for name, op in TABLE.items():
            if op.kind is kind and op.trait is not Trait.KERNEL:
                rows[op.trait.value].append(f"`{name}`")
        lines = [f"| {trait} | {', '.join(names)} |" for trait, names in rows.items()]
        parts.append(
            "\n".join([f"## {kind.value}", "", "| trait | primitives |", "|---|---|", *lines])
        )
    inside = sum(op.trait is Trait.KERNEL for op in TABLE.values())
    parts.append(f"{inside} more occur only inside kernels, which are closed boxes.")
    return "\n\n".join(parts)


def modules(folder: Path) -> str:
    """A table of a folder's files: the first sentence of each."""
    files = [path for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
    docs = [(ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0] for path in files]
    rows = [f"| `{path.name}` | {doc.rstrip('.')} |" for path, doc in zip(files, docs, strict=True)]
    return "\n".join(["| file | what it does |", "|---|---|", *rows])


def with_outputs(markdown: str) -> str:
    """The page with what its blocks of Python print, each at its mark."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in BLOCK.findall(markdown):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(block, names)
    return re.sub(
        r"<!-- output: (\w+) -->", lambda mark: f"```text\n{names[mark[1]]}\n```", markdown
    )
