"""The documentation site builds without a broken link, and its pages are whole."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dmlkit.recipe.schema import FAMILIES
from tests.conftest import ROOT, every_command

pytest.importorskip("mkdocs", reason="the extra dmlkit[docs] is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    return folder


pytestmark = pytest.mark.heavy


def test_nothing_is_loaded_from_elsewhere_and_no_line_becomes_a_quotation(site: Path):
    """A reader without network sees all of it, and no other server learns who reads what.

    No page quotes anyone, so a quotation is a line that started with > by accident: > 0, or a doctest.
    """
    pages = {path: path.read_text("utf-8") for path in site.rglob("*.html")}
    for path, page in pages.items():
        assert re.findall(r"<(?:script|img|link)[^>]+?(?:src|href)=\"?(https?://[^\" >]+)", page) == [], path
        assert re.findall(r"<blockquote[^>]*>\s*(.{0,60})", page) == [], path
    assert len(pages) > 80


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_reference_has_every_member_of_a_family(site: Path, family: str):
    page = (site / "api" / family / "index.html").read_text("utf-8")
    variants = [kind for kind in FAMILIES[family].variants.values() if kind.__module__.startswith("dmlkit.")]
    own = [kind.component or kind for kind in variants]
    assert [kind.__name__ for kind in own if f'.{kind.__name__}"' not in page] == []
    assert ".. math::" not in page and ":math:" not in page and "\\[" not in re.sub(r"<code>.*?</code>", "", page)


def test_equations_are_mathml(site: Path):
    page = (site / "api" / "losses" / "index.html").read_text("utf-8")
    assert page.count('<div class="equation"><math') >= 15
    assert page.count("<mtable") >= 1  # those of several lines


def test_the_page_of_a_command_has_all_its_options(site: Path):
    for words, command in every_command():
        if not hasattr(command, "commands"):
            page = (site / "commands" / words.split()[0] / "index.html").read_text("utf-8")
            options = [", ".join(one.opts) for one in command.params if one.param_type_name == "option"]
            assert [option for option in options if f"<code>{option}</code>" not in page] == [], words


CUT = """() => {
  const width = document.documentElement.clientWidth;
  const scrolls = part => part && part !== document.body &&
    (["auto", "scroll"].includes(getComputedStyle(part).overflowX) || scrolls(part.parentElement));
  const parts = [...document.querySelectorAll(".md-content *")];
  const cut = parts.filter(part => part.getBoundingClientRect().right > width + 1 && !scrolls(part));
  return [document.documentElement.scrollWidth - width, cut.slice(0, 3).map(part => part.outerHTML.slice(0, 80))];
}"""
HIDDEN_VERDICTS = """() => [...document.querySelectorAll("th")].filter(cell => cell.textContent === "map@r" &&
  cell.getBoundingClientRect().right > cell.closest(".md-typeset__scrollwrap").getBoundingClientRect().right + 1
).length"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_api.sync_playwright() as running:
        try:
            started = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"chromium does not start: {error}")
        yield started
        started.close()


@pytest.mark.browser
def test_a_telephone_shows_every_page_whole(site: Path, browser: Any):
    """Nothing is wider than 390 pixels, except inside a frame that scrolls."""
    view = browser.new_page(viewport={"width": 390, "height": 844})
    found: dict[str, Any] = {}
    for path in sorted(site.rglob("index.html")):
        view.goto(path.as_uri())
        over, cut = view.evaluate(CUT)
        if over > 0 or cut:
            found[str(path.relative_to(site))] = (over, cut)
    assert found == {}


@pytest.mark.browser
def test_the_columns_of_verdicts_are_visible(site: Path, browser: Any):
    view = browser.new_page(viewport={"width": 1280, "height": 900})
    pages = sorted((site / "papers").glob("*/index.html"))
    tables = 0
    for path in pages:
        view.goto(path.as_uri())
        tables += view.locator("th", has_text=re.compile("^map@r$")).count()
        assert view.evaluate(HIDDEN_VERDICTS) == 0, path
    assert tables >= 5
