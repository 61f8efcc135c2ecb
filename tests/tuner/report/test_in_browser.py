"""The page in a real browser: no error, nothing overflows, every table sorts and filters.

Needs Chromium as the system's package, which .ci/run installs, and playwright; skipped where one is
missing, but not in CI. A small page with everything in it and the committed example are opened.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from published_data import add_baseline
from tilescout.tuner.report import write_report
from toy_op import ToyProblem

EXAMPLE = Path(__file__).parents[3] / "docs" / "reports" / "index.html"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SCREENSHOTS = Path(__file__).parents[3] / "build" / "screenshots"
"""Kept to be looked at; git ignores the folder."""
IS_CI = bool(os.environ.get("CI"))
pytestmark = pytest.mark.skipif(CHROMIUM is None and not IS_CI, reason="no Chromium here")


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(params=["everything", "example"])
def index(request, filled, h200, b200, tmp_path) -> Path:
    if request.param == "example":
        return EXAMPLE
    for device, time_us in ((h200, 15.0), (b200, 7.5)):
        add_baseline(filled, ToyProblem(1 << 20), device, time_us)
    return write_report([filled], tmp_path / "out").index


@pytest.fixture
def open_page(browser, index):
    """Opens the page at a width; fails the test for anything the console says."""
    said: list[str] = []
    pages = []

    def opened(width: int):
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if is_remote(request) else None)
        page.goto(index.as_uri())
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.close()
    assert said == []


def is_remote(request) -> bool:
    return not request.url.startswith(("file:", "data:"))


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_overflows_and_every_picture_is_drawn(open_page, width, request):
    page = open_page(width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # What is wider than the page scrolls inside its own box.
    wide = page.evaluate(
        """() => [...document.querySelectorAll("main *")]
          .filter((e) => !e.closest(".scroll, .canvas"))
          .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
          .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert wide == []
    sizes = page.evaluate("[...document.images].map(i => [i.complete, i.naturalWidth])")
    assert sizes
    assert all(is_complete and natural > 0 for is_complete, natural in sizes)
    shot = SCREENSHOTS / f"report-{request.node.callspec.id}.png"
    page.screenshot(path=shot, full_page=True)
    assert shot.stat().st_size > 10_000


def test_every_table_sorts_both_ways_by_every_column(open_page):
    page = open_page(1280)
    unsorted = page.evaluate(
        """() => {
          const wrong = [];
          for (const table of document.querySelectorAll("table")) {
            [...table.tHead.rows[0].cells].forEach((heading, index) => {
              for (const sign of [1, -1]) {
                heading.click();
                const cells = [...table.tBodies[0].rows].map((row) => row.cells[index]);
                const values = cells.map((c) => c.dataset.sort ?? c.textContent)
                  .filter((v) => v !== "" && v !== "-");
                const isNumber = heading.classList.contains("number");
                const order = new Intl.Collator("en", { numeric: true });
                for (let i = 1; i < values.length; i++) {
                  const [a, b] = [values[i - 1], values[i]];
                  const step = isNumber ? Number(a) - Number(b) : order.compare(a, b);
                  if (sign * step > 0) wrong.push([table.id, index, sign, a, b]);
                }
                const blank = cells.map((c) => ["", "-"].includes(c.dataset.sort ?? c.textContent));
                if (blank.join().includes("true,false")) wrong.push([table.id, index, "blank"]);
              }
            });
          }
          return wrong;
        }"""
    )
    assert unsorted == []
    assert page.locator("th[aria-sort=descending]").count() == page.locator("table").count()


def test_every_table_filters(open_page):
    page = open_page(1280)
    for box in page.locator("input[data-filter]").all():
        table = page.locator(f"#{box.get_attribute('data-filter')}")
        total = table.locator("tbody tr").count()
        box.fill("no row says this")
        assert table.locator("tbody tr:visible").count() == 0
        box.fill("")
        assert table.locator("tbody tr:visible").count() == total
    box = page.locator("input[data-filter=table-devices]")
    box.fill("h200 measured")
    rows = page.locator("#table-devices tbody tr").all_inner_texts()
    hits = sum("h200" in row.lower() and "measured" in row for row in rows)
    assert page.locator("#table-devices tbody tr:visible").count() == hits
    assert 0 < hits < len(rows)
    said = page.locator("[data-hits=table-devices]").inner_text()
    assert said == f"{hits} of {len(rows)} rows"


def test_links_land(open_page, index):
    page = open_page(1280)
    for href in set(page.evaluate("[...document.links].map(a => a.getAttribute('href'))")):
        if href.startswith("#"):
            assert page.locator(f"[id='{href[1:]}']").count() == 1, href
        else:
            assert (index.parent / href).is_file(), href


def test_headings_sort_by_keyboard(open_page):
    page = open_page(1280)
    heading = page.locator("#table-results-h200 th span").nth(3)
    heading.focus()
    page.keyboard.press("Enter")
    assert page.locator("#table-results-h200 th[aria-sort=ascending]").count() == 1


def test_paper_has_no_controls_and_all_rows(open_page):
    page = open_page(1280)
    page.emulate_media(media="print")
    assert page.locator("nav:visible, .tools:visible").count() == 0
    rows = page.locator("#table-failures tbody tr")
    assert rows.count() == page.locator("#table-failures tbody tr:visible").count() > 1
    # Nothing is left in a box that only a screen can scroll.
    hidden = page.evaluate(
        "[...document.querySelectorAll('.scroll')].filter(e => e.scrollHeight > e.clientHeight + 1)"
        ".length"
    )
    assert hidden == 0
    assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")
