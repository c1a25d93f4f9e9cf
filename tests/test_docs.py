"""The code in the README and in docs/ runs, page by page, in the order in which one reads it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = [
    page for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    if BLOCK.search(page.read_text())
]  # fmt: skip


def blocks(page: Path) -> Iterator[str]:
    """The page's blocks of Python, each on the lines that it has in the page."""
    text = page.read_text()
    for block in BLOCK.finditer(text):
        yield "\n" * (text[: block.start()].count("\n") + 1) + block[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_of_a_page_runs(page):
    """All blocks of a page are one program; a failure names the page's line."""
    names = {"__name__": page.stem}
    for code in blocks(page):
        exec(compile(code, str(page), "exec"), names)


@pytest.mark.parametrize("page", ["README.md", "docs/training.md", "docs/ecosystem.md"])
def test_pages_with_code_are_found(page):
    """The pages that show how to use jaxamp are among those that are run, all of their code."""
    assert ROOT / page in PAGES
    assert len(list(blocks(ROOT / page))) == (ROOT / page).read_text().count("```python") > 3
