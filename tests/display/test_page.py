"""The page in a real browser: nothing in the console, charts drawn, the table at work."""

import re
import shutil

import jax
import jax.numpy as jnp
import pytest

from jaxamp import report
from jaxamp.inspect.operation import rows_of
from tests.inspect.programs import MLP, mlp_loss, spec

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LAYERS = 16
NAMES = [f"layer_{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(LAYERS)]  # no numbers


def deep(weights, x):
    """A model of more than 800 operations with its gradient, no two layers in one row."""
    for name, (up, down) in zip(NAMES, weights, strict=True):
        with jax.named_scope(f"{name}/norm"):
            y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
        with jax.named_scope(f"{name}/mlp"):
            x = x + jax.nn.gelu(y @ up) @ down
    return jnp.mean(x**2)


@pytest.fixture(scope="module")
def large():
    """The report of the deep model's training step."""
    weights = [(spec(8, 16), spec(16, 8))] * LAYERS
    found = report(jax.value_and_grad(deep))(weights, spec(4, 8))
    assert len(found.operations) > 800
    return found


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium, playwright's own or one that is on the path."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    with playwright.sync_playwright() as started:
        try:
            launched = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error:
            pytest.skip("no Chromium here: install one, or run `playwright install chromium`")
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def saved(large, tmp_path_factory):
    """The large report's page, drawn once."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    large.save(path)
    return path


@pytest.fixture
def opened(browser, saved):
    """The large report's page; fails if the console got a word or the network a request."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    noise: list[str] = []
    page.on("console", lambda message: noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(saved.as_uri())
    page.select_option("#group", "")
    yield page
    page.close()
    assert noise == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def _column(page, index: int) -> list[str]:
    return page.eval_on_selector_all(
        f"#operations tbody td:nth-child({index})", "cells => cells.map(c => c.textContent)"
    )


def _sizes(page) -> list[float]:
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    words = [text.split() for text in _column(page, 6)]
    return [float(number) * units[unit] for number, unit in words]


def test_every_operation_is_in_the_table(opened, large):
    """As many lines as the report has: the first few hundred at once, the rest on request."""
    count = len(large.operations)
    assert opened.inner_text("#count") == f"{count} of {count}"
    assert opened.locator("#operations tbody tr").count() == 301
    opened.click("tr.rest button")
    rows = opened.locator("#operations tbody tr").count()
    assert 600 < rows <= count
    assert sum(int(word) for word in _column(opened, 2)) == count


def test_the_first_view_is_by_module_and_line(browser, tmp_path):
    """Equal layers are one folded heading with sums; it opens to one row for equal operations."""

    def net(weights, x):
        for index, w in enumerate(weights):
            with jax.named_scope(f"block{index}/dense"):
                x = jnp.tanh(x @ w)
        return jnp.sum(x)

    found = report(jax.grad(net))([spec(8, 8)] * 4, spec(4, 8))
    path = tmp_path / "report.html"
    found.save(path)
    page = browser.new_page()
    page.goto(path.as_uri())
    assert page.inner_text("h1").endswith(found.headline)
    (heading,) = [t for t in page.locator("tr.group").all_inner_texts() if "block*/dense" in t]
    inside = [o for o in found.operations if o.scope.endswith("/dense") and o.place.file]
    assert "x = jnp.tanh(x @ w)" in heading
    assert f"{len(inside)} operations" in heading
    assert page.locator("#operations tbody tr:not(.group)").count() == 0
    page.locator("tr.group", has_text="block*/dense").first.click()
    rows = page.locator("#operations tbody tr:not(.group)", has_text="dot_general")
    assert "4" in rows.first.locator("td").nth(1).inner_text()
    assert page.locator("#residuals tbody tr", has_text="block*/dense").count() > 0
    page.close()


def test_a_click_sorts_and_another_turns_it_round(opened):
    """By bytes, falling then rising; by name, rising."""
    opened.fill("#search", "layer_ah/")
    opened.click("#operations th button:text-is('bytes')")
    falling = _sizes(opened)
    assert falling == sorted(falling, reverse=True)
    assert falling[0] > falling[-1]
    opened.click("#operations th button:text-is('bytes')")
    assert _sizes(opened) == sorted(falling)
    opened.click("#operations th button:text-is('operation')")
    names = opened.eval_on_selector_all(
        "#operations tbody td:nth-child(1)", "cells => cells.map(c => c.firstChild.textContent)"
    )
    assert names[0] == "add"
    assert opened.get_attribute("#operations th:first-child", "aria-sort") == "ascending"


def test_search_and_filters_narrow_the_table(opened, large):
    """Words must all occur; a filter is exact; both together."""
    opened.fill("#search", "dot_general layer_ah/")
    wanted = [o for o in large.contractions if o.scope.startswith("layer_ah/")]
    assert opened.locator("#operations tbody tr").count() == len(wanted) == 6
    opened.select_option("#way", "bwd")
    assert opened.locator("#operations tbody tr").count() == 4
    opened.fill("#search", "no such word")
    assert opened.inner_text("#count").startswith("0 of")


def test_groups_fold_and_add_up(opened, large):
    """By scope: a heading for each, with its sums; a click opens it."""
    opened.select_option("#group", "scope")
    scopes = {o.scope for o in large.operations}
    assert opened.locator("tr.group").count() == len(scopes)
    assert opened.locator("#operations tbody tr").count() == len(scopes)
    heading = opened.locator("tr.group", has_text="layer_ah/mlp").first
    flops = sum(o.tally.flops for o in large.operations if o.scope == "layer_ah/mlp")
    assert f"{flops / 1000:.3g} k" in heading.inner_text()
    heading.click()
    members = len(rows_of([o for o in large.operations if o.scope == "layer_ah/mlp"]))
    assert opened.locator("#operations tbody tr").count() == len(scopes) + members


@pytest.mark.parametrize("key", ["file", "at"])
def test_groups_by_file_and_line_show_the_source(opened, large, key: str):
    """A heading for each file or line with its sums; each operation has its own line's text."""
    opened.select_option("#group", key)
    lines = {(o.place.file, o.place.line) for o in large.operations if o.place.file}
    wanted = len({file for file, _ in lines}) if key == "file" else len(lines)
    headings = [text for text in opened.locator("tr.group").all_inner_texts() if "test_" in text]
    assert len(headings) == wanted
    heading = opened.locator("tr.group", has_text="test_page.py").first
    heading.click()
    row = opened.locator("#operations tbody tr:not(.group)", has_text="dot_general").first
    assert "x = x + jax.nn.gelu(y @ up) @ down" in row.inner_text()


def test_charts_are_drawn(opened, large):
    """Every chart has bars of some size in the colours of their precisions."""
    charts = opened.locator("figure.chart")
    assert charts.count() == 5
    for index in range(5):
        box = charts.nth(index).locator("rect").first.bounding_box()
        assert box["width"] > 5
        assert box["height"] > 5
    shares = opened.locator("figure.chart").first.locator("rect title").all_text_contents()
    low = sum(o.tally.flops for o in large.operations if o.arithmetic == "bf16")
    assert f"{100 * low / large.total.flops:.1f} %" in shares[0]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_themes(opened, theme: str):
    """The system's theme is followed, and a button overrules it."""

    def brightness() -> float:
        colour = opened.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3

    opened.emulate_media(color_scheme=theme)
    assert (brightness() > 128) == (theme == "light")
    opened.click("#theme")
    assert opened.inner_text("#theme") == "theme: light"
    assert brightness() > 128
    opened.click("#theme")
    assert opened.inner_text("#theme") == "theme: dark"
    assert brightness() < 128


def test_hostile_words_stay_words(browser, tmp_path):
    """A scope that looks like markup is shown, not run."""

    def program(x):
        with jax.named_scope("</script><img src=x onerror=alert(1)>"):
            return jnp.tanh(x)

    path = tmp_path / "report.html"
    report(program)(spec(4)).save(path)
    page = browser.new_page()
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.goto(path.as_uri())
    assert "onerror=alert" in page.inner_text("#operations")
    assert dialogs == []
    page.close()


def test_a_notebook_shows_the_page_in_a_frame():
    """The page is quoted whole inside the frame."""
    shown = report(mlp_loss)(*MLP)._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert "&lt;!doctype html&gt;" in shown
    assert "<script" not in shown


def test_the_page_names_no_other_place():
    """No address of anything that would have to be fetched."""
    page = report(mlp_loss)(*MLP).to_html()
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page)
    assert "import " not in page.split("<script>")[1]
