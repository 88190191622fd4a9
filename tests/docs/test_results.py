"""Pages of results say what the files of their studies say, which lie in the repository beside them."""

import shlex
import shutil
from pathlib import Path

import pytest

from dmlkit.study.report import BEGINNING, END, read_results, report
from dmlkit.study.verdicts import StudyResults
from tests.conftest import ROOT

FIRST = f"{BEGINNING} docs/"  # of a block whose studies lie here
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if f"\n{FIRST}" in f"\n{page.read_text('utf-8')}"]
PAPERS = sorted((ROOT / "docs" / "papers").glob("*.md"))
SUMMARY = ROOT / "docs" / "papers.md"
STUDIES = sorted((ROOT / "docs" / "studies").iterdir())
DATA = {
    "Cars196": "cars",
    "glyphs": "glyphs_claims",
    "modes": "modes_claims",
    "frozen photos": "photos_claims",
    "trained photos": "photos_network_claims",
    "Caltech 101": "caltech_claims",
}
METHODS = {
    "ProxyGML": "proxy_gml",
    "SoftTriple": "soft_triple",
    "MPA": "mpa",
    "Proxy-Anchor": "proxy_anchor",
    "Proxy-ISA": "proxy_isa",
    "Grouplet over the batch": "grouplet_batch",
    "Grouplet within groups": "grouplet",
    "CGML": "cgml",
    "binomial deviance": "binomial_deviance",
}


def words_of(page: Path) -> tuple[list[str], str | None]:
    """The studies and the paper that a page was written from."""
    (line,) = (line for line in page.read_text("utf-8").splitlines() if line.startswith(FIRST))
    *words, option, output = shlex.split(line.removeprefix(BEGINNING).removesuffix("-->"))
    assert option == "-o" and ROOT / output == page
    if "--paper" not in words:
        return words, None
    *folders, option, paper = words
    assert option == "--paper"
    return folders, paper


@pytest.mark.heavy
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_what_its_studies_say(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders, paper = words_of(page)
    for folder in folders:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    text, written = page.read_text("utf-8"), tmp_path / page.relative_to(ROOT)
    written.parent.mkdir(parents=True, exist_ok=True)
    before, after = text.partition(FIRST)[0], text.partition(END)[2]
    written.write_text(f"{before}{FIRST} -->\n{END}{after}", "utf-8")
    monkeypatch.chdir(tmp_path)
    report([Path(folder) for folder in folders], page.relative_to(ROOT), paper=paper)
    assert written.read_text("utf-8") == text, "write it again: make papers"
    pictures = sorted((written.parent / written.stem).glob("*.png"))
    assert pictures
    for picture in pictures:
        assert (page.parent / page.stem / picture.name).is_file() and f"({page.stem}/{picture.name})" in text


@pytest.mark.parametrize("page", PAPERS, ids=lambda page: page.stem)
def test_the_page_of_a_paper_tells_of_every_study(page: Path):
    assert words_of(page) == ([f"docs/studies/{study.name}" for study in STUDIES], page.stem)
    assert f"](papers/{page.name})" in SUMMARY.read_text("utf-8")


def test_the_summary_tells_of_the_studies_that_are_not_one_papers_own():
    shared = [study for study in STUDIES if StudyResults.read(study / "results.json").paper is None]
    assert {study.name for study in shared} == {*DATA.values()} and {*PAPERS} <= {*PAGES} and len(PAPERS) == 5
    assert all(f"](papers/{study.name}.png)" in SUMMARY.read_text("utf-8") for study in shared)


def test_the_table_of_the_summary_has_the_differences_that_are_decided():
    text = SUMMARY.read_text("utf-8")
    lines = text[text.index("| methods | Cars196 |") :].partition("\n\n")[0].splitlines()
    (_, *columns), _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    table = {
        (column, *(METHODS[name] for name in methods.split(" against "))): cell
        for methods, *cells in rows
        for column, cell in zip(columns, cells, strict=True)
        if cell
    }
    words: dict[tuple[str, str, str], dict[str, str]] = {}
    for column, name in DATA.items():
        for one in (verdict for verdict in read_results(ROOT / "docs" / "studies" / name).verdicts if verdict.paper):
            shown = {"makes no difference": "=", "not separable at this size": "open"}
            cell = shown.get(str(one.corrected_verdict), f"**{one.difference:+.3f}**")
            words.setdefault((column, one.better, one.than), {})[one.metric] = cell
    assert table == {key: f"{by['recall@1']} / {by['map@r']}" for key, by in words.items()}
