"""The results of several studies as one document, such as docs/results.md. Nothing is typed by hand."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from dmlkit.errors import UserError
from dmlkit.evaluation.tables import as_markdown
from dmlkit.files.atomic import atomic_write
from dmlkit.files.outputs import check_output, is_our_picture, writing
from dmlkit.study.findings.derived import check_derived
from dmlkit.study.findings.results import StudyResults
from dmlkit.study.record import StudyRecord
from dmlkit.study.reports.duration import spoken_time
from dmlkit.study.reports.page import ReportPage
from dmlkit.study.reports.papers import of_paper, paper_paragraphs
from dmlkit.study.reports.plot import plot_study
from dmlkit.study.reports.report import EXPLANATION, counted_verdicts, study_section
from dmlkit.study.reports.tables import shared_rows, verdict_rows


def report(folders: Sequence[Path], output: Path, *, paper: str | None = None) -> list[Path]:
    """Write the results of studies as one document, and their plots beside it in a folder of its name.

    Of a document that is there the block is replaced that a report wrote before; the text around it stays.

    Args:
        folders: of studies, in the order in which they are told.
        output: the document, ``.md``.
        paper: tell the statements of this paper alone, and the variants that they name.

    Returns:
        The folders of which nothing is told: they have no statement of the paper.

    Raises:
        UserError: a folder holds no finished study, two have the same name, no statement is of the paper, or the output
            is somebody else's.
    """
    if output.suffix != ".md":
        raise UserError(f"--output {output}: expected a name that ends in .md; plots go into a folder beside it")
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise UserError(f"report: two studies have the same name: {', '.join(names)}")
    page = ReportPage.at(output)
    studies = {name: read_results(folder) for name, folder in zip(names, folders, strict=True)}
    if paper is not None:
        studies = of_paper(studies, paper)
    plots = output.parent / output.stem
    pictures = {name: plots / f"{name}.png" for name in studies}
    for picture in pictures.values():
        check_output(picture, lambda path: is_our_picture(path) or f"({plots.name}/{path.name})" in page.text)
    plots.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        with writing(picture), atomic_write(picture) as partial:
            plot_study(studies[name], partial)
    shown = {name: f"{plots.name}/{picture.name}" for name, picture in pictures.items()}
    words = [*map(str, folders), *([] if paper is None else ["--paper", paper]), "-o", str(output)]
    if paper is None:
        page.write(shlex.join(words), "What of the papers' claims holds", overview_paragraphs(studies, shown))
    else:
        page.write(shlex.join(words), f"What holds of {paper}", paper_paragraphs(studies, shown))
    return [folder for name, folder in zip(names, folders, strict=True) if name not in studies]


def overview_paragraphs(studies: Mapping[str, StudyResults], plots: Mapping[str, str]) -> list[str]:
    """All claims of studies, then each study.

    Args:
        studies: by name.
        plots: where the picture of each is, from the document.
    """
    rows = [["claim", "statement", "figure", "difference", "verdict"]]
    for results in studies.values():
        claim = results.claim
        for row in verdict_rows(results)[1:] or [["measured only", "", "", "", "", "", ""]]:
            rows.append([claim, *row[:2], " ".join(filter(None, (row[3], row[4] and f"({row[4]})"))), row[6]])
            claim = ""  # once is enough
    shared = shared_rows(studies)
    tables = [as_markdown(table) for table in (shared, rows) if table]
    sections = [study_section(results, plots[name], heading="##") for name, results in studies.items()]
    return [_counts(list(studies.values())), EXPLANATION, *tables, *sections]


def read_results(folder: Path) -> StudyResults:
    """The results of a finished study.

    Raises:
        UserError: there is none, or it lacks runs.
    """
    stored, path = StudyRecord.of(folder), folder / "results.json"
    results = StudyResults.read(path) if path.exists() else None
    if results is None or results.missing or results.seeds != stored.study.seeds:
        raise UserError(f"{folder}: this study is not finished; go on with: {stored.command}")
    _check_whole(results, path)
    check_derived(results, path)
    return results


def _check_whole(results: StudyResults, path: Path) -> None:
    variants, metrics = results.variants, {*results.metrics, *(judged.metric for judged in results.verdicts)}
    named = {results.reference, *(name for judged in results.verdicts for name in (judged.better, judged.than))}
    figures = [figures for one in variants.values() for figures in (one.summary, one.difference, *one.runs.values())]
    whole = named <= set(variants) and all(metrics <= set(some) for some in figures if some is not None)
    if not whole or (results.axis and len(results.axis.values) != len(variants)):
        raise UserError(f"{path}: speaks of variants or figures that it does not hold; go on with: {results.command}")


def _counts(studies: Sequence[StudyResults]) -> str:
    models, seconds = sum(results.cost.models for results in studies), sum(results.cost.seconds for results in studies)
    named = "1 study" if len(studies) == 1 else f"{len(studies)} studies"
    worked = f"{named}, {models} models, {spoken_time(seconds)} of training and validation."
    return f"{worked}\n{counted_verdicts(studies)}"
