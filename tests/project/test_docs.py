"""The code in the README and in docs/ runs, page by page, in the order in which one reads it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE
)  # and what it prints, where the page shows that
POSITION = re.compile(r"\S+\.(?:py|md):\d+")  # a page shows the lines of a file of one's own
PAGES = [
    page for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    if BLOCK.search(page.read_text())
]  # fmt: skip


LONG = {
    "docs/ecosystem.md", "docs/explanation/autodiff.md", "docs/fp8.md", "docs/how-to/fp8.md",
    "docs/how-to/nan.md", "docs/kernels.md", "docs/probe.md", "docs/training.md",
    "docs/tutorial/train.md",
}  # fmt: skip


def page_of(path: Path) -> object:
    """A page as a parameter of a test."""
    name = str(path.relative_to(ROOT))
    marks = [pytest.mark.long] if name in LONG else []
    return pytest.param(path, id=name, marks=marks)


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """The page's blocks of Python, each on the lines that it has in the page, and what they print.

    Three dots stand for anything.
    """
    text = page.read_text()
    for block in BLOCK.finditer(text):
        yield "\n" * (text[: block.start()].count("\n") + 1) + block[1], block[2] or ""


def words(text: str) -> str:
    """A text without its line breaks and widths, and without the lines that it names."""
    return POSITION.sub("LINE", " ".join(text.split()))


@pytest.mark.parametrize("page", [page_of(page) for page in PAGES])
def test_code_of_a_page_runs(page, capsys):
    """All blocks of a page are one program, and print what is shown; a failure names the line."""
    names = {"__name__": page.stem}
    for code, shown in blocks(page):
        exec(compile(code, str(page), "exec"), names)
        printed = words(capsys.readouterr().out)
        for part in shown.split("…"):
            assert words(part) in printed


def test_what_pages_print_is_found():
    """The check above has something to check."""
    assert sum(bool(shown) for page in PAGES for _, shown in blocks(page)) >= 5


@pytest.mark.parametrize("page", ["README.md", "docs/training.md", "docs/ecosystem.md"])
def test_pages_with_code_are_found(page):
    """The pages that show how to use jaxamp are among those that are run, all of their code."""
    assert ROOT / page in PAGES
    assert len(list(blocks(ROOT / page))) == (ROOT / page).read_text().count("```python") > 2


def test_docs_are_short():
    """A how-to page fits two screens, and all pages but the lab notebook an evening."""
    lines = {page: len(page.read_text().splitlines()) for page in ROOT.glob("docs/**/*.md")}
    assert max(n for page, n in lines.items() if page.parent.name == "how-to") <= 80
    assert sum(n for page, n in lines.items() if page.name != "lab-notebook.md") <= 3266
