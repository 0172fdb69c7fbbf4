"""The report in a real browser: no errors, no network, no overflow, nothing of a sample runs."""

import os
import shutil

import pytest

from driver.report import main
from tests.driver.report.runs import HOSTILE, write_run

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
VIEWS = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 360, "height": 740}, "color_scheme": "light"},
}


def missing(reason):
    """Without a browser there is nothing to test; CI installs one, so there it is a failure."""
    if "CI" in os.environ:
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        missing("no browser: apt-get install chromium-headless-shell")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("no playwright: pip install -e '.[test]'")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    runs = [write_run(folder / "a<b>&"), write_run(folder / "b", steps=40, seed=7)]
    out = folder / "compare.html"
    main([*map(str, runs), "--out", str(out)])
    assert out.stat().st_size < 5_000_000
    return out


def open_page(browser, path, view):
    """The page and what went wrong while it loaded."""
    page = browser.new_page(**VIEWS[view])
    trouble = []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on(
        "request",
        lambda request: trouble.append(request.url) if page.url != "about:blank" else None,
    )
    page.goto(path.as_uri())
    return page, trouble


@pytest.mark.parametrize("view", VIEWS)
def test_page_is_quiet_and_fits(browser, page_file, view):
    page, trouble = open_page(browser, page_file, view)
    assert trouble == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    sizes = page.eval_on_selector_all(
        ".chart svg", "all => all.map(e => [e.clientWidth, e.clientHeight])"
    )
    assert len(sizes) >= 10 and all(w > 200 and h > 150 for w, h in sizes)
    columns = page.eval_on_selector_all(
        ".columns > div",
        "all => new Set(all.map(e => Math.round(e.getBoundingClientRect().x))).size",
    )
    assert (columns == 1) == (view == "phone")
    # No cell of a table is cut off or has to be scrolled to.
    edges = page.eval_on_selector_all(
        "td, .cells > div", "all => all.map(e => e.getBoundingClientRect().right)"
    )
    assert len(edges) > 12 and max(edges) <= VIEWS[view]["viewport"]["width"]
    assert page.locator(".scroll").count() == 0
    page.close()


def test_samples_and_names_are_text(browser, page_file):
    page, _ = open_page(browser, page_file, "light")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, script").count() == 0
    shown = page.locator("article pre:not(.prompt)").first.inner_text()
    assert shown == HOSTILE.replace("\ud83d", "?")
    assert page.locator("header .run").first.inner_text() == "a<b>&"
    page.close()


def test_colours_follow_the_reader_s_preference(browser, page_file):
    brightness = {}
    for view in ("light", "dark"):
        page, _ = open_page(browser, page_file, view)
        for part in ("color", "background-color"):
            rgb = page.evaluate(
                f"getComputedStyle(document.body).getPropertyValue('{part}').match(/\\d+/g)"
            )
            brightness[view, part] = sum(map(int, rgb[:3])) / 765
        page.close()
    assert brightness["light", "background-color"] > 0.9 > 0.2 > brightness["light", "color"]
    assert brightness["dark", "background-color"] < 0.2 < 0.8 < brightness["dark", "color"]
