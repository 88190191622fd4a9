"""The documentation site builds without a broken link, and its pages are whole."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from dmlkit.cli.app import app
from dmlkit.recipe.schema import FAMILIES
from tests.conftest import ROOT

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


pytestmark = [pytest.mark.slow, pytest.mark.heavy]


def test_nothing_is_loaded_from_elsewhere(site: Path):
    """A reader without network sees all of it, and nobody is told who reads what."""
    for path in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|link)[^>]+?(?:src|href)=\"?(https?://[^\" >]+)", path.read_text("utf-8"))
        assert loaded == [], path


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


@pytest.mark.parametrize("name", sorted(get_command(app).commands))  # pyright: ignore
def test_the_page_of_a_command_has_all_its_options(site: Path, name: str):
    page = (site / "commands" / name / "index.html").read_text("utf-8")
    command = get_command(app).commands[name]  # pyright: ignore
    for leaf in getattr(command, "commands", {name: command}).values():
        for parameter in leaf.params:
            if parameter.param_type_name == "option":
                assert f"<code>{', '.join(parameter.opts)}</code>" in page
