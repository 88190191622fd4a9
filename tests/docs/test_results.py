"""Pages of results say what the files of their studies say, which lie in the repository beside them."""

import shlex
import shutil
from pathlib import Path

import pytest

from dmlkit.study.overview import BEGINNING, report
from tests.conftest import ROOT

PAGES = [
    page
    for page in sorted((ROOT / "docs").glob("*.md"))
    if page.read_text("utf-8").startswith(f"{BEGINNING} docs/studies/")
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_what_its_studies_say(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = page.read_text("utf-8")
    words = shlex.split(text.splitlines()[0].removeprefix(BEGINNING).removesuffix("-->"))
    *folders, option, output = words
    assert option == "-o" and ROOT / output == page
    for folder in folders:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    report([Path(folder) for folder in folders], Path(output))
    assert (tmp_path / output).read_text("utf-8") == text
    for folder in folders:
        assert (page.parent / page.stem / f"{Path(folder).name}.png").is_file()


def test_there_are_such_pages():
    assert PAGES
