"""Links from page to page, and to files of the checkout, lead somewhere."""

import re
from pathlib import Path

import pytest

from tests.pages import FENCE, PAGES, ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(page: Path) -> list[str]:
    """Where a page points to within the checkout."""
    found = LINK.findall(FENCE.sub("", page.read_text()))
    return [link for link in found if "://" not in link and not link.startswith("mailto:")]


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings have."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """To a file or folder that is there, and to a heading of that page."""
    for link in links(page):
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_links_and_anchors_are_found():
    """The check above has something to check."""
    assert sum(len(links(page)) for page in PAGES) > 50
    assert any("#" in link for page in PAGES for link in links(page))
    assert "parameters-in-bf16" in anchors(ROOT / "docs/training.md")


@pytest.mark.parametrize(
    "words",
    [
        "autocast",
        "GradScaler",
        "half precision",
        "flash attention",
        "master weights",
        "logits memory",
    ],
)
def test_the_words_that_people_type_first_are_on_a_page(words):
    """The site's search finds what pages say; the home page, at least, says these."""
    assert words in (ROOT / "docs/index.md").read_text()
