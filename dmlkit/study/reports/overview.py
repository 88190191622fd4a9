"""Report of several studies as a block of a Markdown page or as LaTeX, from results that are checked first."""

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from dmlkit.errors import UserError, counted
from dmlkit.files.atomic import atomic_write
from dmlkit.files.escape import markdown, printable
from dmlkit.files.outputs import writing
from dmlkit.study.findings.results import StudyResults
from dmlkit.study.record import StudyRecord
from dmlkit.study.reports.report import (
    EXPLANATION,
    counted_verdicts,
    disagreement_paragraphs,
    of_paper,
    paper_paragraphs,
    plot_study,
    study_section,
)
from dmlkit.study.reports.tables import write_tables
from dmlkit.study.status import format_duration


def report(folders: Sequence[Path], output: Path, *, paper: str | None = None) -> list[Path]:
    """Write the results of studies as one document: a Markdown page with plots, or tables for LaTeX.

    In an existing page only the block of an earlier report is replaced; the text around it does not change. A file for
    LaTeX is replaced whole.

    Args:
        paper: report only the statements of this paper, and the variants that they name.

    Returns:
        The folders that are not in the report because they have no statement of the paper.
    """
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise UserError(f"report: two studies have the same name: {', '.join(names)}")
    around = text_around(output) if output.suffix == ".md" else None
    studies = {name: read_results(folder) for name, folder in zip(names, folders, strict=True)}
    if paper is not None:
        studies = of_paper(studies, paper)
    words = shlex.join([*map(str, folders), *([] if paper is None else ["--paper", paper]), "-o", str(output)])
    if around is None:
        write_tables(studies, output, words)
    else:
        shown = {name: f"{output.stem}/{name}.png" for name in studies}
        for name, results in studies.items():
            picture = output.parent / shown[name]
            with writing(picture), atomic_write(picture) as partial:
                plot_study(results, partial)
        paragraphs = (overview_paragraphs if paper is None else paper_paragraphs)(studies, shown)
        write_block(output, around, words, f"Verdicts on the claims of {paper or 'papers'}", paragraphs)
    return [folder for name, folder in zip(names, folders, strict=True) if name not in studies]


def overview_paragraphs(studies: Mapping[str, StudyResults], plots: Mapping[str, str]) -> list[str]:
    """Return the paragraphs of a report: what holds in all, then each study with its picture, relative to the page."""
    costs = [results.cost for results in studies.values()]
    models, seconds = sum(cost.models for cost in costs), sum(cost.seconds for cost in costs)
    number = counted(len(studies), "study", "studies")
    cost = f"{number}, {models} models, {format_duration(seconds)} of training and validation."
    counts = f"{cost}\n{counted_verdicts(list(studies.values()))}"
    claims = Counter(results.claim for results in studies.values())
    sections: list[str] = []
    for name, results in studies.items():
        if claims[results.claim] > 1:  # the same study of other data
            results = results.model_copy(update={"claim": f"{results.claim} ({name})"})
        sections.append(study_section(results, plots[name]))
    return [*disagreement_paragraphs(studies), counts, EXPLANATION, *sections]


def read_results(folder: Path) -> StudyResults:
    """Read the results of a finished study."""
    stored, path = StudyRecord.of(folder), folder / "results.json"
    results = StudyResults.read(path) if path.exists() else None
    if results is None or results.missing or results.seeds != stored.seeds:
        raise UserError(f"{folder}: this study is not finished; continue it with: {stored.command}")
    variants, metrics = results.variants, {*results.metrics, *(judged.metric for judged in results.verdicts)}
    named = {results.reference, *(name for judged in results.verdicts for name in (judged.better, judged.than))}
    figures = [figures for one in variants.values() for figures in (one.summary, one.difference, *one.runs.values())]
    is_complete = named <= set(variants) and all(metrics <= set(some) for some in figures if some is not None)
    if not is_complete or (results.axis and len(results.axis.values) != len(variants)):
        raise UserError(f"{path}: variants or metrics are missing; write the file again with: {results.command}")
    return results


BEGINNING = "<!-- Written by: dmlkit report"  # start of the block's first line, which also has the arguments
END = "<!-- End of what dmlkit report wrote -->"


def text_around(path: Path) -> tuple[str, str]:
    """Return the text of a page above and below the block that a report writes; the page need not exist."""
    if not path.exists():
        return "", "\n"
    try:
        text = path.read_bytes().decode("utf-8")  # as bytes, so that line ends around the block do not change
    except UnicodeDecodeError as error:
        raise UserError(f"--output {path}: is not a UTF-8 text: {error}") from None
    begins, ends = (
        [match.span() for match in re.finditer(f"^{re.escape(mark)}", text, re.MULTILINE)] for mark in (BEGINNING, END)
    )
    if len(begins) != 1 or len(ends) != 1 or begins > ends:
        raise UserError(
            f"--output {path}: expected one line that starts with '{BEGINNING}' and below it one line '{END}', "
            f"since the report is written between them; got {len(begins)} and {len(ends)} such lines"
        )
    (begin, _), (_, end) = *begins, *ends
    return text[:begin], text[end:]


def write_block(path: Path, around: tuple[str, str], arguments: str, title: str, paragraphs: Sequence[str]) -> None:
    """Write a page atomically, given the text around the block; with text above it, the page has no title of ours."""
    head = [f"{BEGINNING} {printable(arguments).replace('>', '&gt;')} -->"]
    if not around[0].strip():
        head.append(f"# {markdown(title)}")
    block = "\n\n".join([*head, *paragraphs, END])
    with writing(path), atomic_write(path) as partial:
        partial.write_bytes(f"{around[0]}{block}{around[1]}".encode())
