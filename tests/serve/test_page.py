"""The page of ``dmlkit serve`` in a browser: each flow, by mouse and keys, at the width of a phone and of a screen."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.datasets import trees

playwright: Any = pytest.importorskip("playwright.sync_api", reason="playwright is missing: make test-browser")
pytestmark = pytest.mark.browser
BAD = f"<img src=x onerror=alert(1)>{'_of_one_word' * 12}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]) -> Iterator[tuple[str, Path]]:
    """The address of a server with a token, and a folder with photos."""
    from dmlkit.gallery.change import create_gallery
    from dmlkit.review.table import review
    from tests.vectors.stored import ON_CPU

    folder = tmp_path_factory.mktemp("page")
    trained_once(folder)
    trees.birds(folder / "photos", ("crow", "dove", BAD), 4)
    create_gallery(folder / "run", folder / "photos", folder / "gallery", model=ON_CPU)
    trees.photos(folder / "inbox", (f"{index}.jpg" for index in range(12)), first=500, side=(40, 30))
    review(folder / "gallery", folder / "inbox", folder / "review", model=ON_CPU)
    command = [sys.executable, "-m", "dmlkit", "serve", str(folder / "gallery"), "--port", "0", "--allow-writes"]
    command += ["--review", str(folder / "review")]
    environment = {**os.environ, "DMLKIT_TOKEN": "secret", "COLUMNS": "300"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield next(word for word in line.split() if word.startswith("http://")), folder
        process.terminate()


@pytest.fixture(params=[1280, 360])
def page(request: pytest.FixtureRequest, server: tuple[str, Path]) -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        path = shutil.which("chromium") or driver.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("chromium is missing: make test-browser")
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        found = browser.new_page(viewport={"width": request.param, "height": 800})
        faults = list[str]()
        found.on("pageerror", lambda error: faults.append(str(error)))
        found.on("dialog", lambda dialog: faults.append(dialog.message))
        found.on("request", lambda one: one.url.startswith((server[0], "blob:", "data:")) or faults.append(one.url))
        found.goto(server[0])
        found.fill("#login input", "secret")
        found.keyboard.press("Enter")
        found.locator("#source", has_text="images").wait_for()
        yield found
        assert found.evaluate("document.documentElement.scrollWidth") <= request.param
        assert faults == []
        browser.close()


def test_a_photo_is_identified_added_found_removed_and_restored(page: Any, server: tuple[str, Path], tmp_path: Path):
    width = page.viewport_size["width"]
    photo = tmp_path / f"{width}.jpg"
    trees.photo(photo, 300 + width, (40, 30))
    page.set_input_files("input[data-use=identify]", photo)
    page.wait_for_selector(".answer .verdict")
    page.locator(".answer .shelf img[src^=blob]").nth(2).wait_for()
    label = f"heron{width}"
    page.fill(".answer form input", label)
    page.keyboard.press("Enter")
    page.locator("#message", has_text=f"Added as {label}").wait_for()

    page.click("nav a[href='#gallery']")
    page.click(f"text='{label} (1)'")
    page.wait_for_selector("#images figure")
    page.click("#images button")
    page.locator("#message", has_text="Removed").wait_for()
    assert page.locator(f"text='{label} (1)'").count() == 0
    page.click("#history summary")
    page.locator("#versions button").first.click()
    page.locator("#message", has_text="Restored").wait_for()
    assert page.locator(f"text='{label} (1)'").count() == 1


def test_photos_are_searched_and_compared(page: Any, server: tuple[str, Path], tmp_path: Path):
    first, second = (server[1] / "photos" / "crow" / f"{index}.jpg" for index in (0, 1))
    notes = tmp_path / "notes.txt"
    notes.write_text("not an image")
    page.click("nav a[href='#search']")
    page.fill("#neighbors", "0")
    page.set_input_files("input[data-use=search]", first)
    page.locator("#message", has_text="expected a whole number from 1 to 100").wait_for()
    page.fill("#neighbors", "5")
    page.set_input_files("input[data-use=search]", [first, notes, second])
    page.locator("#message", has_text="2 photos searched. 1 file that is no image was left out.").wait_for()
    assert page.locator(".answer").count() == 2 and page.locator(".answer figure").count() == 10
    assert page.locator(".answer").first.locator("figcaption strong").first.inner_text() == "crow"
    page.click("nav a[href='#compare']")
    page.set_input_files("input[data-use=compare]", [first, first])
    page.wait_for_selector(".pair")
    assert page.inner_text("section[data-view=compare] .verdict") == "Similarity 1.000"  # without a threshold
    assert f"dmlkit calibrate {server[1] / 'run'}" in page.inner_text("section[data-view=compare]")
    page.click("section[data-view=compare] .results button")
    page.locator("#why[open] svg").wait_for()
    page.keyboard.press("Escape")
    page.set_input_files("input[data-use=compare]", first)
    page.locator("#message", has_text="Choose two photos").wait_for()


def test_questions_are_answered_with_keys_and_explained(page: Any, server: tuple[str, Path]):
    name = f"ada{page.viewport_size['width']}"
    page.click("nav a[href='#review']")
    page.locator("#asked", has_text="Is it").wait_for()
    page.fill("#reviewer", name)
    page.keyboard.press("Tab")
    page.locator("#question img[src^=blob]").nth(1).wait_for()
    page.click("#question .shelf button >> nth=0")
    page.locator("#why[open] svg").wait_for()
    assert page.locator("#why svg image").count() == 2 and page.locator("#why-list li").count() == 8
    page.keyboard.press("Escape")
    for keys, label in ((["y"], None), (["o", "a new bird", "Enter"], "a new bird"), (["u"], "cannot tell")):
        page.locator("#asked").focus()
        before = page.inner_text("#asked")
        for key in keys:
            page.keyboard.type(key) if len(key) > 5 else page.keyboard.press(key)
        page.locator("#message", has_text=f"Saved: {label or before.removeprefix('Is it ').rstrip('?')}.").wait_for()
    page.keyboard.press("b")
    page.locator("#question", has_text=f"{name} said cannot tell").wait_for()
    answers = [json.loads(line) for line in (server[1] / "review" / "answers.jsonl").read_text().splitlines()]
    given = [one["answer"]["label"] for one in answers if one.get("answer", {}).get("reviewer") == name]
    assert len(given) == 3 and given[1:] == ["a new bird", None]


def test_an_answer_that_comes_in_another_view_is_not_announced_there(page: Any, server: tuple[str, Path]):
    held = list[Any]()
    page.route("**/v1/identify", lambda sent: held.append(sent))
    page.set_input_files("input[data-use=identify]", server[1] / "photos" / "crow" / "0.jpg")
    page.locator("#message", has_text="1 photo sent").wait_for()
    page.click("nav a[href='#search']")
    held[0].continue_()
    page.locator("section[data-view=identify] .verdict").wait_for(state="attached")
    assert page.inner_text("#message") == ""


def test_names_are_shown_as_text(page: Any):
    page.click("nav a[href='#gallery']")
    page.wait_for_selector("#labels button")
    assert any(BAD in text for text in page.locator("#labels button").all_inner_texts())
    labels = page.locator("#labels")
    assert labels.evaluate("list => list.scrollWidth - list.clientWidth") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation_in_any_view(page: Any, server: tuple[str, Path], scheme: str):
    axe = pytest.importorskip("axe_playwright_python", reason="axe-core is missing: make test-browser")
    code = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    page.emulate_media(color_scheme=scheme)

    def violations() -> list[Any]:
        page.evaluate(code)
        return json.loads(page.evaluate("axe.run().then((result) => JSON.stringify(result.violations))"))

    photos = [server[1] / "photos" / "crow" / f"{index}.jpg" for index in (0, 1)]
    shown = {"identify": ".answer .shelf img", "search": ".answer .shelf img", "compare": ".pair"}
    for view, result in shown.items():
        page.click(f"nav a[href='#{view}']")
        assert violations() == [], view
        page.set_input_files(f"input[data-use={view}]", photos)
        page.locator(f"section[data-view={view}] {result}").first.wait_for()
        assert violations() == [], f"{view} with results"
    page.click("section[data-view=compare] .results button")
    page.locator("#why[open] svg").wait_for()
    assert violations() == [], "why"
    page.keyboard.press("Escape")
    page.click("nav a[href='#gallery']")
    page.click("#labels button >> nth=0")
    page.wait_for_selector("#images figure")
    page.click("#history summary")
    assert violations() == [], "gallery"
    page.click("nav a[href='#review']")
    page.locator("#asked").wait_for()
    assert violations() == [], "review"


def test_what_is_not_listed_is_told_and_a_removal_hides_no_image(page: Any, server: tuple[str, Path]):
    import dmlkit.serve

    code = (Path(dmlkit.serve.__path__[0]) / "page" / "app.js").read_text(encoding="utf-8")
    for before, after in (("PAGE = 60", "PAGE = 2"), ("LABELS = 500", "LABELS = 2"), ("VERSIONS = 50", "VERSIONS = 1")):
        assert code.count(before) == 1
        code = code.replace(before, after)
    page.route("**/page/app.js", lambda sent: sent.fulfill(body=code, content_type="text/javascript"))
    page.reload()
    page.click("nav a[href='#gallery']")
    page.locator("#unlisted", has_text="more label").wait_for()
    assert page.locator("#labels li").count() == 2
    page.click("text='crow (4)'")
    page.locator("#images figure").nth(1).wait_for()
    page.click("#images button >> nth=0")
    page.locator("#message", has_text="Removed 0.jpg").wait_for()
    assert page.inner_text("#shown-label") == "crow, 3 images"
    page.click("#more")
    page.locator("#images figure").nth(2).wait_for()
    names = [name.split()[0] for name in page.locator("#images figcaption").all_inner_texts()]
    assert names == ["1.jpg", "2.jpg", "3.jpg"] and page.locator("#more").is_hidden()
    page.click("#history summary")
    page.locator("#versions li", has_text="older version").wait_for()
    page.unroute("**/page/app.js")
    page.reload()
    page.click("#history summary")
    page.locator("#versions button").first.click()
    page.locator("#message", has_text="Restored").wait_for()
