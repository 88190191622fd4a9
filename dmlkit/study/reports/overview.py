"""The results of several studies as one document, such as docs/results.md. Nothing is typed by hand."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dmlkit.errors import UserError
from dmlkit.evaluation.tables import as_markdown
from dmlkit.files.atomic import atomic_write
from dmlkit.files.escape import markdown, printable
from dmlkit.files.outputs import check_output, is_our_picture, writing
from dmlkit.study.definition.config import Expectation
from dmlkit.study.findings.results import StudyResults
from dmlkit.study.findings.verdicts import Difference, judge, over_seeds
from dmlkit.study.record import StudyRecord
from dmlkit.study.reports.plot import plot_study
from dmlkit.study.reports.report import EXPLANATION, counted_verdicts, of_paper, paper_paragraphs, study_section
from dmlkit.study.reports.tables import format_duration, shared_rows, verdict_rows


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
    worked = f"{named}, {models} models, {format_duration(seconds)} of training and validation."
    return f"{worked}\n{counted_verdicts(studies)}"


BEGINNING = "<!-- Written by: dmlkit report"  # of the block's first line, which goes on with what was asked
END = "<!-- End of what dmlkit report wrote -->"


@dataclass(frozen=True)
class ReportPage:
    """A Markdown file, in three.

    Args:
        path: of the file; need not exist.
        before: the text above the block.
        block: from the line of `BEGINNING` to that of `END`; empty where there is no page yet.
        after: the text below.
    """

    path: Path
    before: str = ""
    block: str = ""
    after: str = "\n"

    @classmethod
    def at(cls, path: Path) -> "ReportPage":
        """The page of a file. One that begins with a block without an end is of an older dmlkit, and all block.

        Raises:
            UserError: the file is somebody else's, or has not one beginning and below it one end.
        """
        check_output(path, lambda path: BEGINNING.encode() in path.read_bytes())
        if not path.exists():
            return cls(path)
        try:
            text = path.read_bytes().decode("utf-8")  # as bytes: ends of lines around the block stay what they are
        except UnicodeDecodeError as error:
            raise UserError(f"--output {path}: cannot read this page: {error}") from None
        begins, ends = (
            [found.span() for found in re.finditer(f"^{re.escape(mark)}", text, re.MULTILINE)]
            for mark in (BEGINNING, END)
        )
        if not ends and [begin for begin, _ in begins] == [0]:
            return cls(path, block=text)
        if len(begins) != 1 or len(ends) != 1 or begins > ends:
            raise UserError(
                f"--output {path}: expected one line that begins with '{BEGINNING}' and below it one '{END}', between "
                f"which the report is written; got {len(begins)} and {len(ends)} of them"
            )
        (begin, _), (_, end) = *begins, *ends
        return cls(path, text[:begin], text[begin:end], text[end:])

    @property
    def text(self) -> str:
        """All of the file."""
        return self.before + self.block + self.after

    def write(self, asked: str, title: str, paragraphs: Sequence[str]) -> None:
        """Replace the block, all or nothing.

        Args:
            asked: the words of the command that writes it.
            title: of the page; below text it is left out, which has a title of its own.
            paragraphs: of Markdown.
        """
        head = [f"{BEGINNING} {printable(asked).replace('>', '&gt;')} -->"]
        if not self.before.strip():
            head.append(f"# {markdown(title)}")
        block = "\n\n".join([*head, *paragraphs, END])
        with writing(self.path), atomic_write(self.path) as partial:
            partial.write_bytes(f"{self.before}{block}{self.after}".encode())


ROUNDING = 1e-6  # of figures derived again, perhaps by another SciPy
STATED = set(Expectation.model_fields)  # of a judged statement, what the study's file says


def check_derived(results: StudyResults, path: Path) -> None:
    """Make sure that means, differences and verdicts are those of the runs' figures, to `ROUNDING`.

    Args:
        results: as read, whole.
        path: of the file, for the error.

    Raises:
        UserError: they are not: somebody has edited the file.
    """
    reference = results.variants.get(results.reference)
    for name, variant in results.variants.items():
        others = None if name == results.reference or reference is None else reference.runs
        summary, difference = over_seeds(variant.runs, others, results.metrics)
        if not _is_close(_plain(variant.summary), _plain(summary)):
            raise _edited(path, f"variants.{name}.summary", results)
        if not _is_close(_plain(variant.difference), _plain(difference)):
            raise _edited(path, f"variants.{name}.difference", results)
    expectations = [Expectation.model_validate(one.model_dump(include=STATED)) for one in results.verdicts]
    derived_verdicts = judge(expectations, results.variants, len(results.seeds), results.more_seeds, results.negligible)
    if len(derived_verdicts) < len(expectations):
        raise _edited(path, "verdicts", results)
    for stored, derived in zip(results.verdicts, derived_verdicts, strict=True):
        told = stored.model_dump()
        if stored.corrected_p_value is None:  # of dmlkit 0.1.0, which told less, and told no other verdicts
            told = {name: told[name] for name in Difference.model_fields}
        if not _is_close(told, {name: value for name, value in derived.model_dump().items() if name in told}):
            raise _edited(path, f"the verdict on {stored.better!r} and {stored.than!r}", results)


def _edited(path: Path, what: str, results: StudyResults) -> UserError:
    return UserError(
        f"{path}: {what} does not follow from the figures of its runs: the file was edited; the runs are as they were, "
        f"and this writes it again: {results.command}"
    )


def _plain(documents: Mapping[str, BaseModel] | None) -> Any:
    return documents and {name: one.model_dump() for name, one in documents.items()}


def _is_close(stored: Any, derived: Any) -> bool:
    """Whether plain data are the same, numbers to `ROUNDING`: SciPy's quantiles differ in the last digit."""
    if isinstance(stored, dict) and isinstance(derived, dict):
        return stored.keys() == derived.keys() and all(_is_close(stored[key], derived[key]) for key in stored)
    if isinstance(stored, float) and isinstance(derived, float):
        return isclose(stored, derived, rel_tol=ROUNDING, abs_tol=ROUNDING)
    return stored == derived
