"""Pages that count losses, families, studies, models or statements give the numbers of the code and of docs/studies."""

import re
from collections import Counter
from pathlib import Path

import pytest

from dmlkit.losses.base import LossConfig
from dmlkit.metrics.base import MetricConfig
from dmlkit.recipe.schema import FAMILIES
from dmlkit.study.report import BEGINNING, END, read_results
from dmlkit.study.tables import disagreements
from dmlkit.study.verdicts import StudyResults
from tests.conftest import ROOT

WORDS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *(f"{word}teen" for word in ("thir", "four", "fif", "six", "seven", "eigh", "nine")),
    "twenty",
]
NUMBER = rf"(?P<number>\d+(?: \d{{3}})*|{'|'.join(WORDS[5:])})"  # smaller ones count something else, e.g. two losses
COUNTED = re.compile(
    rf"(?<!Of )(?<!PML has about )\b{NUMBER} (?:more )?(?P<noun>losses|families|studies|models|statements)\b",
    re.IGNORECASE,
)
HISTORY = {"CHANGELOG.md"}  # what earlier versions had
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md")), ROOT / "docs" / "llms.txt"]
PATTERNS = {
    "holds": r"(\d+)(?: of \d+ statements)? holds?\b",
    "does not hold": r"(\d+) do(?:es)? not\b",
    "makes no difference": r"(\d+) makes? no difference",
    "not separable at this size": r"(\d+) are not separable",
    "not trained": r"(\d+) compare variants of which one or both score below",
}  # how docs/measured.md counts each verdict


def number_of(text: str) -> int:
    return WORDS.index(text.lower()) if text.lower() in WORDS else int(text.replace(" ", ""))


def studies() -> dict[str, StudyResults]:
    return {folder.name: read_results(folder) for folder in sorted((ROOT / "docs" / "studies").iterdir())}


def claims_of(found: dict[str, StudyResults]) -> dict[str, StudyResults]:
    """The studies of all papers on the smaller grounds, which are counted together; Cars is counted alone."""
    return {name: one for name, one in found.items() if one.paper is None and name != "cars"}


def own(family: type) -> int:
    """Count the members that dmlkit itself has; plug-ins of other tests stay in the family."""
    variants: dict[str, type] = family.variants
    return sum(kind.__module__.startswith("dmlkit.") for kind in variants.values())


@pytest.fixture(scope="module")
def counts() -> dict[str, set[int]]:
    found = studies()
    claims = claims_of(found)
    cars = [one.cost.models for name, one in found.items() if name.startswith("cars")]
    models = [{name: one.cost.models for name, one in some.items()} for some in (found, claims)]
    total, of_claims = (sum(some.values()) for some in models)
    of_guide = read_results(ROOT / "docs/results/which_loss")
    return {
        "losses": {
            own(LossConfig),
            len({*of_guide.variants} & {*LossConfig.variants}),
            *(len(found[name].variants) for name in ("photos_claims", "caltech_claims")),
        },
        "families": {len(FAMILIES)},
        "studies": {len(found), len(claims), len(claims) + 1, len(found) - len(claims) - len(cars)},
        "models": {of_claims, total - of_claims - sum(cars), *models[0].values(), of_guide.cost.models},
        "statements": {sum(len(one.verdicts) for one in claims.values()) // 2},
    }


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORY], ids=lambda page: page.name)
def test_a_page_counts_what_there_is(page: Path, counts: dict[str, set[int]]):
    text = page.read_text("utf-8")
    text = re.sub(rf"^{re.escape(BEGINNING)} .*?^{re.escape(END)}", "", text, flags=re.DOTALL | re.MULTILINE)
    found = [
        (number_of(one["number"]), one["noun"].lower(), one[0]) for one in COUNTED.finditer(" ".join(text.split()))
    ]
    wrong = [
        words for number, noun, words in found if number not in counts[noun] and not (noun == "models" and number < 100)
    ]
    assert wrong == [], counts


def test_the_number_of_losses_and_metrics_in_the_comparison_of_libraries():
    readme = (ROOT / "README.md").read_text("utf-8")
    counts = {name: int(number) for name, number in re.findall(r"^\| (losses|metrics) \| (\d+),", readme, re.MULTILINE)}
    assert counts == {"losses": own(LossConfig), "metrics": own(MetricConfig)}
    from_pml = (ROOT / "docs/guides/from_pml.md").read_text("utf-8")
    assert f"PML has about 34 losses, dmlkit {own(LossConfig)}." in from_pml


def test_the_page_of_measurements_counts_the_verdicts_of_the_claims():
    claims = claims_of(studies())
    row = next(line for line in (ROOT / "docs/measured.md").read_text("utf-8").splitlines() if "claim by claim" in line)
    found = re.search(r"by R@1 (\d.*); by MAP@R (\d.*?disagree on (\d+))", row)
    assert found and int(found[3]) == len(disagreements(claims))
    for metric, part in (("recall@1", found[1]), ("map@r", found[2])):
        judged = [one for results in claims.values() for one in results.verdicts if one.metric == metric]
        counts = {
            verdict: int(count[1]) if (count := re.search(words, part)) else 0 for verdict, words in PATTERNS.items()
        }
        assert counts == {verdict: Counter(one.corrected_verdict for one in judged)[verdict] for verdict in PATTERNS}
        assert sum(counts.values()) == len(judged) and f"{len(judged)} statements" in row
