"""What studies say of one paper, against their results.json; and statements that several studies judge."""

import json
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.main import get_command

from dmlkit.cli.app import app
from dmlkit.recipe.schema import Recipe
from dmlkit.study.report import END, counted_verdicts, disagreement_paragraphs, read_results
from dmlkit.study.verdicts import StudyResults
from tests.conftest import ROOT
from tests.study.fakes import STUDY, margin_of, train_by, write_study

STATEMENTS = """\
- {better: large, than: small, metric: map@r, paper: margins}
- {better: huge, than: small, metric: map@r, paper: margins}
- {better: huge, than: middle, metric: map@r, paper: other}
- {better: middle, than: small, metric: map@r}
"""
MARGINS = {"small": 0.1, "middle": 0.2, "large": 0.3, "huge": 0.4}
VARIANTS = "".join(f"  {name}: {{loss.margin: {margin}}}\n" for name, margin in MARGINS.items())
FOUR = f"{STUDY.partition('variants:')[0].replace('[0, 1]', '[0, 1, 2]')}variants:\n{VARIANTS}expect:\n{STATEMENTS}"
NOISE = (0.003, -0.002, 0.004)
SHOWN = {"not separable at this size": "", "makes no difference": "no difference"}
"""What a table shows of a verdict, if it is not the verdict."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two studies of the same statements: a larger margin gains in the one, and loses in the other."""
    parent = tmp_path_factory.mktemp("grounds")
    for name, gain in (("photos", 0.5), ("glyphs", -0.5)):

        def tell(recipe: Recipe, gain: float = gain) -> tuple[float, float]:
            return 0.5, 0.7 + gain * margin_of(recipe) + NOISE[recipe.seed] * margin_of(recipe)

        path = write_study(parent, FOUR.replace("A larger margin", f"On {name} a larger margin"))
        with pytest.MonkeyPatch.context() as patch:
            train_by(patch, tell)
            arguments = ["study", str(path), "-o", str(parent / name), "--device", "cpu"]
            get_command(app).main(arguments, standalone_mode=False)
    return parent


@pytest.fixture
def grounds(finished: Path, tmp_path: Path) -> list[Path]:
    """A copy of both studies for each test."""
    return [shutil.copytree(finished / name, tmp_path / name) for name in ("photos", "glyphs")]


def rows_of(text: str, head: str) -> list[list[str]]:
    """The rows of the table that begins with a column."""
    lines = text[text.index(f"| {head} |") :].partition("\n\n")[0].splitlines()
    return [line[2:-2].split(" | ") for line in lines[2:]]


def test_a_page_has_the_statements_of_its_paper_alone_corrected_for_the_whole_study(dmlkit, grounds, tmp_path: Path):
    page = tmp_path / "margins.md"
    page.write_text(f"# Margins\n\n<!-- Written by: dmlkit report -->\n{END}\n\nBelow.\n")
    assert dmlkit("report", *grounds, "--paper", "margins", "-o", page).ok().out.count("\n") == 1
    text = page.read_text()
    assert text.startswith("# Margins\n\n<!-- Written by: ") and text.endswith(f"{END}\n\nBelow.\n")
    statements = rows_of(text, "statement")
    assert [row[:2] for row in statements] == [
        ["large better than small", "photos"],
        ["", "glyphs"],
        ["huge better than small", "photos"],
        ["", "glyphs"],
    ]
    for row, (better, folder) in zip(statements, product(("large", "huge"), grounds), strict=True):
        results = json.loads((folder / "results.json").read_text())
        (judged,) = (one for one in results["verdicts"] if (one["better"], one["than"]) == (better, "small"))
        values = {name: [run["map@r"] for run in results["variants"][name]["runs"].values()] for name in MARGINS}
        p_value = stats.ttest_rel(values[better], values["small"]).pvalue
        assert judged["p_value"] == pytest.approx(p_value) and judged["corrected_p_value"] > 1.9 * p_value
        figures = f"{judged['difference']:+.4f} ± {(judged['high'] - judged['low']) / 2:.4f}"
        assert row[2].startswith(figures) and SHOWN.get(judged["verdict"], judged["verdict"]) in row[2]
    assert "middle" not in text
    for folder in grounds:
        assert f"- {folder.name} ([picture](margins/{folder.name}.png)): seeds 0 to 2; " in text
        assert f"    {json.loads((folder / 'study.json').read_text())['command']}\n" in text
        assert (tmp_path / "margins" / f"{folder.name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_of_several_studies_has_a_section_of_each(dmlkit, grounds, tmp_path: Path):
    page = tmp_path / "all.md"
    dmlkit("report", grounds[0], grounds[0], "-o", page).refused("two studies have the same name: photos, photos")
    dmlkit("report", *grounds, "-o", page).ok()
    every = {folder: StudyResults.read(folder / "results.json") for folder in grounds}
    first, *sections = page.read_text().split("\n## ")
    hold = sum(one.verdict == "holds" for results in every.values() for one in results.verdicts)
    assert "2 studies, 24 models, " in first and f"Of 8 statements, {hold} hold" in first
    for (folder, results), section in zip(every.items(), sections, strict=True):
        verdicts = results.verdicts
        assert section.startswith(f"On {folder.name} a larger margin is better\n")
        assert f"    {results.command}\n" in section and f"(all/{folder.name}.png)" in section
        for (statement, cell), one in zip(rows_of(section, "statement"), verdicts, strict=True):
            assert statement == f"{one.better} better than {one.than}"
            assert cell.startswith(f"{one.difference:+.4f} ± ")
            assert SHOWN.get(one.verdict, one.verdict) in cell
            assert ("Holm" in cell) == (one.verdict != one.corrected_verdict)
        for name, mean in rows_of(section, "variant"):
            variant = results.variants[name]
            assert mean.startswith(f"{variant.summary['map@r'].mean:.4f} ± ")
            assert variant.pretrained and f"; before training map@r {variant.pretrained['map@r']:.4f}; " in section
    again = shutil.copytree(grounds[0], tmp_path / "again")  # the same claim, as of other data
    assert dmlkit("report", grounds[0], again, "-o", tmp_path / "two.md").code == 0
    heads = [line for line in (tmp_path / "two.md").read_text().splitlines() if line.startswith("## ")]
    assert heads == [f"## On photos a larger margin is better ({name})" for name in ("photos", "again")]


def test_a_page_says_first_on_which_statements_the_figures_disagree(dmlkit, tmp_path, monkeypatch):
    """The fakes' recall@1 falls as map@r rises."""
    gain = {"small": 0.0, "large": 0.2, "huge": -0.2}
    names = {0.1: "small", 0.3: "large", 0.4: "huge"}
    train_by(
        monkeypatch, lambda recipe: (0.5, 0.5 + gain[names[margin_of(recipe)]] + NOISE[recipe.seed] * margin_of(recipe))
    )
    text = STUDY.replace("[0, 1]", "[0, 1, 2]").replace("[map@r]", "[recall@1, map@r]").partition("variants:")[0]
    variants = "".join(f"  {name}: {{loss.margin: {margin}}}\n" for margin, name in names.items())
    stated = "".join(f"- {{better: {name}, than: small, metric: map@r}}\n" for name in ("large", "huge"))
    path = write_study(tmp_path, f"{text}variants:\n{variants}expect:\n{stated}")
    folder, page = tmp_path / "both", tmp_path / "p.md"
    assert dmlkit("study", path, "-o", folder, "--device", "cpu").code == 0
    results = StudyResults.read(folder / "results.json")
    assert [(one.better, one.metric) for one in results.verdicts] == [
        (name, metric) for name in ("large", "huge") for metric in ("recall@1", "map@r")
    ]
    assert dmlkit("report", folder, "-o", page).code == 0
    for document in (page.read_text(), (folder / "results.md").read_text()):
        assert "**The metrics disagree on 2 of 2 statements**" in document
        assert "correction: large better than small; huge better than small.\n\n" in document
        assert document.index("**The metrics disagree") < document.index("| statement | ")
    rows = rows_of(page.read_text(), "statement | recall@1 | map@r")
    for row, one in zip(rows, (one for one in results.verdicts if one.metric == "map@r"), strict=True):
        assert row[1].startswith(f"{-one.difference:+.4f} ± ") and row[2].startswith(f"{one.difference:+.4f} ± ")
    assert "By recall@1: of 2 statements" in page.read_text() and "By map@r: of 2 statements" in page.read_text()


def test_the_studies_of_the_papers_are_judged_by_both_figures():
    """By SciPy, of two studies; and of one where the metrics disagree."""
    studies = ROOT / "docs" / "studies"
    for name in ["proxy_gml_ratio", "photos_network_claims"]:
        results = read_results(studies / name)
        assert len(results.verdicts) == 2 * sum(verdict.metric == "map@r" for verdict in results.verdicts)
        for verdict in results.verdicts:
            runs = [results.variants[variant].runs for variant in (verdict.better, verdict.than)]
            seeds = runs[0].keys() & runs[1].keys()
            found = stats.ttest_rel(*([run[seed][verdict.metric] for seed in seeds] for run in runs))
            low, high = found.confidence_interval()
            assert verdict.difference == pytest.approx((low + high) / 2, abs=1e-6)
            if results.more_seeds:  # a correction for the tests after each added seed
                assert verdict.p_value >= found.pvalue - 1e-6
        assert results.verdicts[0].corrected_p_value is not None
        least = min(verdict.p_value for verdict in results.verdicts)
        expected = pytest.approx(len(results.verdicts) * least, rel=1e-5)
        assert min(verdict.corrected_p_value or 1 for verdict in results.verdicts) == expected
    modes = {
        (verdict.better, verdict.than, verdict.metric): verdict
        for verdict in read_results(studies / "modes_claims").verdicts
    }
    first, second = (modes["proxy_gml", "soft_triple", metric] for metric in ("recall@1", "map@r"))
    assert (first.corrected_verdict, second.corrected_verdict) == ("not separable at this size", "does not hold")


def test_the_page_says_what_reused_runs_of_tuning_change():
    text = " ".join((ROOT / "docs/papers.md").read_text("utf-8").split())
    gaps: dict[str, list[float]] = {}
    moved: list[float] = []
    for folder in sorted((ROOT / "docs/studies").glob("*_claims")):
        results = read_results(folder)
        fresh = {name: set(variant.runs) - set(results.tune_seeds) for name, variant in results.variants.items()}
        for name, variant in results.variants.items():
            if reused := variant.runs.keys() & set(results.tune_seeds):
                means = [np.mean([variant.runs[seed]["map@r"] for seed in seeds]) for seeds in (reused, fresh[name])]
                gaps.setdefault(folder.name, []).append(float(means[0] - means[1]))
        for verdict in results.verdicts:
            better, than = (results.variants[name].runs for name in (verdict.better, verdict.than))
            seeds, metric = fresh[verdict.better] & fresh[verdict.than], verdict.metric
            change = float(np.mean([better[seed][metric] - than[seed][metric] for seed in seeds]))
            if verdict.corrected_verdict in ("holds", "does not hold"):
                assert change * verdict.difference > 0
                moved.append(abs(change - verdict.difference))
    assert set(gaps) == {"photos_network_claims"}  # which the page names in words
    (mean,) = (float(np.mean(gap)) for gap in gaps.values())
    assert f"on average {mean:.3f} above that of the other seeds" in text
    assert "none changes by more than 0.002" in text and max(moved) < 0.002


def test_a_study_without_the_paper_is_told_and_a_paper_that_none_has_is_one_line(dmlkit, grounds, tmp_path: Path):
    older = tmp_path / "older"
    shutil.copytree(grounds[0], older)
    data = json.loads((older / "results.json").read_text())
    for judged in data["verdicts"]:
        del judged["paper"]
    (older / "results.json").write_text(json.dumps(data))
    page = tmp_path / "page.md"
    result = dmlkit("report", grounds[0], older, "--paper", "other", "-o", page)
    assert result.code == 0 and f"note: {older} has no statement of other and is left out\n" in result.out
    assert "- older" not in page.read_text() and not (tmp_path / "page" / "older.png").exists()
    before = page.read_bytes()
    dmlkit("report", *grounds, "--paper", "margin", "-o", page).refused("expected one of margins, other")
    dmlkit("report", older, "--paper", "margins", "-o", page).refused("add e.g. paper: mpa to a statement under expect")
    assert page.read_bytes() == before


def test_a_statement_may_get_another_paper_in_a_study_that_is_finished(dmlkit, grounds, tmp_path, monkeypatch):
    trained = train_by(monkeypatch, lambda _: "nothing is trained again")
    path = write_study(tmp_path, FOUR.replace("paper: margins", "paper: new").replace(", paper: other", ""))
    result = dmlkit("study", path, "-o", grounds[1], "--device", "cpu")
    assert result.code == 0 and trained.folders == [], result.err
    verdicts = StudyResults.read(grounds[1] / "results.json").verdicts
    assert [judged.paper for judged in verdicts] == ["new", "new", None, None]
    path.write_text(FOUR.replace("better: huge, than: middle", "better: huge, than: large"))
    dmlkit("study", path, "-o", grounds[1], "--device", "cpu").refused("expect")


def test_a_single_statement_is_in_the_singular():
    results = StudyResults.read(ROOT / "tests/fixtures/0.1.0/study/results.json")
    (agreement,) = disagreement_paragraphs({"": results})
    assert " on 1 statement: " in agreement and counted_verdicts([results]).count(": of 1 statement, ") == 2


def test_the_pages_say_how_long_trainings_of_cars_end():
    variants = read_results(ROOT / "docs/studies/cars_proxy_isa").variants
    papers, page = (
        " ".join((ROOT / f"docs/{name}.md").read_text("utf-8").split()) for name in ("papers", "papers/proxy_isa")
    )
    ends: dict[str, tuple[float, float, str]] = {}
    for metric in ("recall@1", "map@r"):
        ours, theirs = (
            np.array([run[metric] for run in variants[name].last.values()]) for name in ("proxy_isa", "proxy_anchor")
        )
        low, high = stats.ttest_rel(ours, theirs).confidence_interval()
        ends[metric] = (ours.mean(), theirs.mean(), f"({(low + high) / 2:+.3f} ± {(high - low) / 2:.3f})")
    ours, theirs, gain = ends["recall@1"]
    before = variants["proxy_anchor"].pretrained
    assert before is not None and max(ours, theirs) < before["recall@1"]
    assert f"its R@1 is {ours:.3f} and Proxy-Anchor's {theirs:.3f}, both below" in papers
    assert f"R@1 ends at {ours:.3f} and Proxy-Anchor's at {theirs:.3f} {gain}" in page
    ours, theirs, gain = ends["map@r"]
    assert f"MAP@R at {ours:.3f} and {theirs:.3f} {gain}" in page
