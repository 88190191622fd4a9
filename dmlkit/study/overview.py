"""The results of several studies as one document, such as docs/results.md. Nothing is typed by hand."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from dmlkit.errors import UserError
from dmlkit.evaluation.tables import as_markdown
from dmlkit.files.atomic import atomic_write
from dmlkit.files.escape import printable
from dmlkit.files.outputs import check_output, head_of, is_our_picture, writing
from dmlkit.study.derived import check_derived
from dmlkit.study.duration import spoken_time
from dmlkit.study.plot import plot_study
from dmlkit.study.record import StudyRecord
from dmlkit.study.report import EXPLANATION, counted_verdicts, study_section, write_text
from dmlkit.study.results import StudyResults
from dmlkit.study.tables import verdict_rows

BEGINNING = "<!-- Written by: dmlkit report"  # tells the document again


def report(folders: Sequence[Path], output: Path) -> None:
    """Write the results of studies as one document, and their plots beside it in a folder of its name.

    Args:
        folders: of studies, in the order in which they are told.
        output: the document, ``.md``.

    Raises:
        UserError: a folder holds no finished study, two have the same name, or the output is somebody else's.
    """
    if output.suffix != ".md":
        raise UserError(f"--output {output}: expected a name that ends in .md; plots go into a folder beside it")
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise UserError(f"report: two studies have the same name: {', '.join(names)}")
    check_output(output, _is_overview)
    shown = output.read_text("utf-8") if output.is_file() else ""
    plots = output.parent / output.stem
    pictures = [plots / f"{name}.png" for name in names]
    for picture in pictures:
        check_output(picture, lambda path: is_our_picture(path) or f"({plots.name}/{path.name})" in shown)
    studies = [read_results(folder) for folder in folders]
    plots.mkdir(parents=True, exist_ok=True)
    for results, picture in zip(studies, pictures, strict=True):
        with writing(picture), atomic_write(picture) as partial:
            plot_study(results, partial)
    rows = [["claim", "statement", "figure", "difference", "verdict"]]
    for results in studies:
        claim = results.claim
        for row in verdict_rows(results)[1:] or [["measured only", "", "", "", "", "", ""]]:
            rows.append([claim, *row[:2], " ".join(filter(None, (row[3], row[4] and f"({row[4]})"))), row[6]])
            claim = ""  # once is enough
    words = printable(shlex.join([*map(str, folders), "-o", str(output)])).replace(">", "&gt;")
    sections = [
        study_section(results, f"{plots.name}/{name}.png", heading="##")
        for name, results in zip(names, studies, strict=True)
    ]
    head = [f"{BEGINNING} {words} -->", "# What of the papers' claims holds", _counts(studies), EXPLANATION]
    head.append(as_markdown(rows))
    write_text(output, "\n\n".join([*head, *sections]))


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


def _is_overview(path: Path) -> bool:
    return head_of(path).startswith(BEGINNING.encode())


def _counts(studies: Sequence[StudyResults]) -> str:
    models, seconds = sum(results.cost.models for results in studies), sum(results.cost.seconds for results in studies)
    named = "1 study" if len(studies) == 1 else f"{len(studies)} studies"
    worked = f"{named}, {models} models, {spoken_time(seconds)} of training and validation."
    return f"{worked}\n{counted_verdicts(studies)}"
