"""The page in a browser: no error, no request, sorting, filtering, zooming, by mouse and by keys."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.identify.test_duplicates import HURTS, labelled, turned
from tests.vectors.stored import embeddings_at

playwright: Any = pytest.importorskip("playwright.sync_api", reason="playwright is missing: make test-browser")
pytestmark = pytest.mark.browser
SHAPES = {"wide": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        path = shutil.which("chromium") or driver.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("chromium is missing: make test-browser")
        found = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dmlkit.look.inspection.findings import inspect
    from dmlkit.look.inspection.page import write_inspection

    folder = tmp_path_factory.mktemp("report")
    angles = np.concatenate([center + np.arange(6) for center in (0, 5, 60, 120)])
    names = ["crow</script>", f"dove{HURTS}", "finch", "gull<b>"]
    source = labelled(embeddings_at(folder / "e", turned(*angles.tolist())), [name for name in names for _ in range(6)])
    write_inspection(inspect(source), folder / "report.html", "birds <script>alert(1)</script>")
    return folder / "report.html"


@pytest.fixture(params=[(shape, scheme) for shape in SHAPES for scheme in ("light", "dark")], ids="-".join)
def page(request: pytest.FixtureRequest, browser: Any, report: Path) -> Iterator[Any]:
    shape, scheme = request.param
    width, height = SHAPES[shape]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    opened, errors = context.new_page(), list[str]()

    def note(event: Any) -> None:  # a message, an error or a request
        address = getattr(event, "url", "")
        if not address.startswith(("file:", "data:")):
            errors.append(address or getattr(event, "text", str(event)))

    for kind in ("console", "pageerror", "request"):
        opened.on(kind, note)
    opened.goto(report.as_uri())
    yield opened
    assert errors == []
    context.close()


def column(page: Any, number: int) -> list[str]:
    return page.locator(f"#class-table tbody tr td:nth-child({number})").all_inner_texts()


def test_nothing_is_wider_than_the_screen_and_titles_are_text(page: Any):
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    assert page.locator("h1").inner_text() == "birds <script>alert(1)</script>"
    assert page.locator("h1 *").count() == 0


def test_the_table_sorts_and_filters_by_mouse_and_keys(page: Any):
    worst = [float(value) for value in column(page, 5)]
    assert worst == sorted(worst) and len(worst) == 4
    page.locator("#class-table th button").nth(4).click()
    assert [float(value) for value in column(page, 5)] == worst[::-1]
    assert page.locator("#class-table th").nth(4).get_attribute("aria-sort") == "descending"
    page.locator("#class-table th button").nth(0).focus()
    page.keyboard.press("Enter")
    assert column(page, 1) == sorted(column(page, 1)) and column(page, 1)[0] == "crow</script>"
    page.locator("#filter").fill("GULL")
    assert column(page, 1) == ["gull<b>"] and page.locator("#shown").inner_text() == "1 of 1 classes shown"


def test_the_map_zooms_and_tells_of_the_image_under_the_pointer(page: Any):
    canvas = page.locator("#embedding-map")
    canvas.scroll_into_view_if_needed()
    before = canvas.screenshot()
    canvas.focus()
    page.keyboard.press("+")
    page.keyboard.press("ArrowLeft")
    assert "photos/" not in page.locator("#under").inner_text()  # short names
    assert ".jpg" in page.locator("#under").inner_text()
    assert canvas.screenshot() != before
    page.keyboard.press("0")
    page.locator("#highlight").fill("finch")
    page.locator("#plane").select_option("PCA")
    page.locator("#closer").click()
    page.locator("#whole").click()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    page.mouse.wheel(0, -300)
    assert canvas.screenshot() != before
