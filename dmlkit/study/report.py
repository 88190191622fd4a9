"""Reports of studies: a page or LaTeX tables of several, the page of one, and its picture.

In a page only the block between two marks is written. The picture shows the figures per variant or over the swept key.
"""

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from dmlkit.errors import UserError, counted
from dmlkit.files.atomic import atomic_write
from dmlkit.files.escape import as_markdown, markdown, printable
from dmlkit.files.outputs import write_output, writing
from dmlkit.files.pictures import picture
from dmlkit.files.source import STUDY_MARK
from dmlkit.study.definition.config import Axis
from dmlkit.study.record import StudyFailures, StudyRecord
from dmlkit.study.status import format_duration
from dmlkit.study.tables import (
    disagreements,
    pretrained_text,
    statement_rows,
    trained_rows,
    tuning_rows,
    variant_rows,
    verdict_rows,
    write_tables,
)
from dmlkit.study.verdicts import JudgedStatement, StudyResults, VariantResults


def report(folders: Sequence[Path], output: Path, *, paper: str | None = None) -> list[Path]:
    """Write the results of studies as one document: a Markdown page with plots, or tables for LaTeX.

    In an existing page only the block of an earlier report is replaced; the text around it does not change. A file for
    LaTeX is replaced whole. With ``paper`` only its statements are reported, and the variants that they name; the
    folders of studies without any are returned.
    """
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        raise UserError(f"report: two studies have the same name: {', '.join(names)}")
    around = text_around(output) if output.suffix.lower() == ".md" else None
    studies = {name: read_results(folder) for name, folder in zip(names, folders, strict=True)}
    if paper is not None:
        studies = of_paper(studies, paper)
    arguments = shlex.join([*map(str, folders), *([] if paper is None else ["--paper", paper]), "-o", str(output)])
    if around is None:
        write_tables(studies, output, arguments)
    else:
        plots = {name: f"{output.stem}/{name}.png" for name in studies}
        for name, results in studies.items():
            plot_study(results, output.parent / plots[name])
        paragraphs = (overview_paragraphs if paper is None else paper_paragraphs)(studies, plots)
        write_block(output, around, arguments, f"Verdicts on the claims of {paper or 'papers'}", paragraphs)
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
        claim, table = markdown(results.claim), as_markdown(trained_rows(results))
        verdicts = [as_markdown(statement_rows({"": results}))] if results.verdicts else []
        image = f"![{claim}]({quote(plots[name])})"  # relative to the page
        paragraphs = [f"## {claim}", *_source_paragraph(results), *verdicts, table, image]
        sections.append("\n\n".join([*paragraphs, *_repeat_paragraphs(results)]))
    return [*disagreement_paragraphs(studies), counts, EXPLANATION, *sections]


def read_results(folder: Path) -> StudyResults:
    """Read the results of a finished study."""
    stored, path = StudyRecord.read(folder / STUDY_MARK), folder / "results.json"
    results = StudyResults.read(path) if path.exists() else None
    is_of_all = results is not None and (results.seeds, {*results.variants}) == (stored.seeds, {*stored.variants})
    if results is None or results.missing or not is_of_all:  # seeds and variants may be added later
        raise UserError(f"{folder}: this study is not finished; continue it with: {stored.command}")
    variants, metrics = results.variants, {*results.metrics, *(judged.metric for judged in results.verdicts)}
    named = {results.reference, *(name for judged in results.verdicts for name in (judged.better, judged.than))}
    is_complete = all(
        metrics <= set(figures)
        for variant in variants.values()
        for figures in (variant.summary, *variant.runs.values())
    )
    if not is_complete or not named <= set(variants) or (results.axis and len(results.axis.values) != len(variants)):
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


PLOT = "results.png"
# Predicates of one statement and of several statements with a verdict
COUNTED = {
    "holds": ("holds", "hold"),
    "does not hold": ("does not", "do not"),
    "makes no difference": ("makes no difference", "make no difference"),
    "not separable at this size": ("is not separable at this size", "are not separable at this size"),
    "not trained": ("compares variants that are not trained", "compare variants that are not trained"),
    "equal by construction": ("is equal by construction", "are equal by construction"),
}
ALWAYS_COUNTED = {"holds", "does not hold", "not separable at this size"}
EXPLANATION = """\
Results are those of test classes, with the checkpoint that was best on validation classes. ± is a 95 % interval
(Student's t) over seeds; that of a difference also covers test classes where a number of them is given. A statement
holds if its whole interval is above 0; without a word it is not separable. "Not after Holm": not after the correction
for all statements and metrics of the study. "Not trained": a variant is below its own network before training by every
metric."""


def _source_paragraph(results: StudyResults) -> list[str]:
    source = markdown(", ".join(filter(None, (results.paper, results.table))))
    return [f"From: {source}."] if source else []


def study_page(results: StudyResults) -> str:
    """Return one study as a page of its own, which has every value that was tried, and may lack runs."""
    claim = markdown(results.claim)
    paragraphs = [f"# {claim}", *_source_paragraph(results), *map(markdown, missing_lines(results))]
    paragraphs += disagreement_paragraphs({"": results})
    if results.verdicts:
        paragraphs.append(as_markdown(verdict_rows(results)))
    paragraphs += [as_markdown(variant_rows(results)), f"![{claim}]({PLOT})"]
    if trials := _trials(results):
        seeds = f"seeds {', '.join(map(str, results.tune_seeds))}" if results.tune_seeds else "the first seed"
        differ = ", not the same number" * (" to " in trials)  # where values failed
        text = f"Tuned with {seeds} on validation classes, with {trials}{differ}:"
        paragraphs += [text, as_markdown(tuning_rows(results))]
    return "\n\n".join([*paragraphs, *_repeat_paragraphs(results), EXPLANATION])


def _repeat_paragraphs(results: StudyResults) -> list[str]:
    setting, cost = _setting(results), results.cost
    spent = f"{cost.models} models, {format_duration(cost.seconds)} on {markdown('; '.join(cost.on))}"
    return [f"{setting[0].upper()}{setting[1:]}; {spent}. To repeat it:", f"    {printable(results.command)}"]


def write_section(results: StudyResults, folder: Path) -> Path:
    """Write the document and picture of a study into its folder, and return the path of the document."""
    plot_study(results, folder / PLOT)
    document = folder / "results.md"
    write_output(document, f"{study_page(results)}\n")
    return document


def counted_verdicts(studies: Sequence[StudyResults]) -> str:
    """Return sentences with the number of statements per verdict, and of verdicts that the correction changes.

    Statements that are judged by several metrics are counted once for each metric.
    """
    by_metric: dict[str, list[JudgedStatement]] = {}
    for judged in (judged for results in studies for judged in results.verdicts):
        by_metric.setdefault(judged.metric, []).append(judged)
    if len(by_metric) < 2:
        return _counted(next(iter(by_metric.values()), []))
    return "\n".join(f"By {metric}: {_counted(statements, 'of')}" for metric, statements in by_metric.items())


def _counted(statements: Sequence[JudgedStatement], of: str = "Of") -> str:
    counts = Counter(judged.verdict for judged in statements)
    phrases = [
        f"{counts[verdict]} {one if counts[verdict] == 1 else more}"
        for verdict, (one, more) in COUNTED.items()
        if counts[verdict] or verdict in ALWAYS_COUNTED
    ]
    text = f"{of} {counted(len(statements), 'statement')}, {', '.join(phrases[:-1])}, and {phrases[-1]}."
    lost = sum(judged.corrected_verdict != judged.verdict for judged in statements)
    are = "is" if lost == 1 else "are"
    after = f" After Holm's correction, {lost} of those that hold or do not hold {are} undecided."
    return text + after if lost else text


def disagreement_paragraphs(studies: Mapping[str, StudyResults]) -> list[str]:
    """Return a sentence with the statements on which metrics disagree; empty if none is judged by several."""
    pairs = Counter(
        (name, judged.better, judged.than) for name, results in studies.items() for judged in results.verdicts
    )
    several = sum(count > 1 for count in pairs.values())
    if not several:
        return []
    names, of = disagreements(studies), counted(several, "statement")
    if not names:
        return [f"**The metrics agree** on {of}: after the correction both lead to the same decision."]
    count = f"**The metrics disagree on {len(names)} of {of}** after the correction"
    return [f"{count}: {markdown('; '.join(names))}."]


def missing_lines(results: StudyResults) -> list[str]:
    """Return lines with the missing runs of a study, and the runs that failed."""
    lacks = [
        f"{name} (seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))})" if name in results.variants else name
        for name, seeds in results.missing.items()
    ]
    incomplete = f"Incomplete; missing: {'; '.join(lacks)}. Differences are over the seeds that both variants have."
    failed = [f"Failed: {line}" for line in StudyFailures(failed=results.failed).lines()]
    return [incomplete, *failed] if lacks else failed


def _setting(results: StudyResults) -> str:
    parts = ["Reality Check protocol, 4 models per run"] if results.protocol == "reality_check" else []
    parts.append(f"seeds {_ranges(results.seeds)}")
    if results.more_seeds:
        parts[-1] += f", up to {results.more_seeds} more while a statement was not separable (intervals corrected)"
    if results.rotate_folds:
        parts[-1] += ", validated on rotating folds"
    counts = {judged.classes for judged in results.verdicts}
    if classes := " and ".join(map(str, sorted(filter(None, counts)))):
        parts.append(f"{classes} test classes{' in the intervals of some metrics' * (not all(counts))}")
    if trials := _trials(results):
        parts.append(trials)
    if results.negligible:
        parts.append(f"differences up to {results.negligible:g} are negligible")
    before = {*map(pretrained_text, results.variants.values())}
    if len(before) == 1 and before != {""}:
        parts.append(f"before training {before.pop()}")
    return "; ".join(parts)


def _trials(results: StudyResults) -> str:
    """Return how many values each variant tried, as text; empty if nothing was tuned."""
    trials = [len(variant.tuned.validation) for variant in results.variants.values() if variant.tuned]
    ends = sorted({min(trials), max(trials)}) if trials else []
    return f"{' to '.join(map(str, ends))} trials per variant" if ends else ""


def _ranges(numbers: Sequence[int]) -> str:
    """Join numbers; three or more consecutive ones become a range."""
    groups = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def of_paper(studies: Mapping[str, StudyResults], paper: str) -> dict[str, StudyResults]:
    """Return the studies with statements of a paper, reduced to these statements and the variants that they name.

    The p-values remain corrected for all statements of a study.
    """
    reduced: dict[str, StudyResults] = {}
    for name, results in studies.items():
        verdicts = tuple(judged for judged in results.verdicts if judged.paper == paper)
        named = {variant for judged in verdicts for variant in (judged.better, judged.than)}
        variants = {variant: figures for variant, figures in results.variants.items() if variant in named}
        if verdicts and verdicts == results.verdicts:
            reduced[name] = results
        elif verdicts:
            reduced[name] = results.model_copy(update={"verdicts": verdicts, "variants": variants, "axis": None})
    if not reduced:
        papers = dict.fromkeys(judged.paper for results in studies.values() for judged in results.verdicts)
        known = ", ".join(filter(None, papers))
        expected = f"expected one of {known}" if known else "add e.g. paper: mpa to a statement under expect"
        raise UserError(f"--paper {paper}: these studies have no statement of this paper; {expected}")
    return reduced


def paper_paragraphs(studies: Mapping[str, StudyResults], plots: Mapping[str, str]) -> list[str]:
    """Return the paragraphs of a paper's report: statements, explanation, and each study with its command."""
    lines = [
        f"- {markdown(name)} ([picture]({quote(plots[name])})): {_setting(results)}; {results.cost.models} models"
        for name, results in studies.items()
    ]
    commands = [f"    {printable(results.command)}" for results in studies.values()]
    paragraphs = [*disagreement_paragraphs(studies), as_markdown(statement_rows(studies)), EXPLANATION]
    return [*paragraphs, "To repeat the studies:", "\n".join(commands), "\n".join(lines)]


LOG_RATIO = 10  # swept values with at least this ratio are drawn on a logarithmic axis
COLOR, FAINT = "#2060a0", "#9ab8d8"


def plot_study(results: StudyResults, path: Path, *, metric: str | None = None) -> None:
    """Draw the mean and 95 % interval of every variant, and each run as a faint dot, in one panel per metric.

    A bar marks the network before training where it lies among the runs. For a swept numeric key a curve with a band is
    drawn over its values. The axis of the figures does not start at 0, so means are drawn as points and not as bars.
    By default all metrics of the study are drawn, each as wide as a column.
    """
    if metric not in (None, *results.metrics):
        raise UserError(f"--metric {metric}: not a metric of this study; expected one of {', '.join(results.metrics)}")
    names, metrics = list(results.variants), results.metrics if metric is None else (metric,)
    height = 62.0 if results.axis else 16 + 5.5 * len(names)
    with picture(path, height, len(metrics)) as figure:
        panels = figure.subplots(1, len(metrics), squeeze=False, sharey=not results.axis)[0]
        for axes, metric in zip(panels, metrics, strict=True):
            if results.axis:
                _draw_curve(axes, metric, list(results.variants.values()), results.axis)
            else:
                _draw_points(axes, metric, results.variants)
            axes.grid(alpha=0.3)


def epoch_groups(folder: Path, results: StudyResults) -> dict[str, list[Path]]:
    """Return the runs that a study reports, by variant; all folds of a Reality Check."""
    groups: dict[str, list[Path]] = {}
    for name, variant in results.variants.items():
        chosen = folder / "runs" / name / (variant.tuned.chosen if variant.tuned else "")
        groups[name] = [
            file.parent for seed in variant.runs for file in sorted(chosen.glob(f"**/seed-{seed}/**/metrics.jsonl"))
        ]
        if not groups[name]:
            raise UserError(
                f"{chosen}: its runs are missing, so there are no curves; train them with the study's command"
            )
    return groups


def _draw_points(axes: Any, metric: str, named: dict[str, VariantResults]) -> None:
    variants = list(named.values())
    means, low, high = _means(variants, metric)
    rows = range(len(variants))
    for row, variant in zip(rows, variants, strict=True):
        runs = [run[metric] for run in variant.runs.values()]
        axes.plot(runs, [row] * len(runs), "o", color=FAINT, markersize=2.5)
    axes.errorbar(means, rows, xerr=[means - low, high - means], fmt="o", color=COLOR, capsize=2, markersize=3.5)
    axes.locator_params(axis="x", nbins=5)  # more labels would overlap
    axes.set_yticks(rows, list(named))
    left, right = axes.get_xlim()  # random weights are far below, and would squeeze the runs together
    before = {
        row: value
        for row, variant in zip(rows, variants, strict=True)
        if variant.pretrained is not None and left <= (value := variant.pretrained[metric]) <= right
    }
    axes.plot(list(before.values()), list(before), "|", color="black", markersize=8)
    axes.set(
        title=f"{metric} of test classes\nmean, 95 % interval, each run{'; | before training' if before else ''}",
        xlabel=metric,
        ylim=(len(variants) - 0.5, -0.5),
    )


def _draw_curve(axes: Any, metric: str, variants: list[VariantResults], axis: Axis) -> None:
    order = sorted(range(len(axis.values)), key=axis.values.__getitem__)
    variants, values = [variants[index] for index in order], [axis.values[index] for index in order]
    means, low, high = _means(variants, metric)
    for value, variant in zip(values, variants, strict=True):
        runs = [run[metric] for run in variant.runs.values()]
        axes.plot([value] * len(runs), runs, "o", color=FAINT, markersize=2.5)
    axes.plot(values, means, "o-", color=COLOR, markersize=3.5)
    axes.fill_between(values, low, high, color=COLOR, alpha=0.2, linewidth=0)
    if values[0] > 0 and values[-1] / values[0] >= LOG_RATIO:
        axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    axes.set(title=f"{metric} of test classes\nmean, 95 % interval, each run", xlabel=axis.key, ylabel=metric)


def _means(variants: list[VariantResults], metric: str) -> NDArray[np.float64]:
    """Return means and the ends of their intervals (3, V); a single run is its own interval."""
    summaries = [variant.summary[metric] for variant in variants]
    ends = [(summary.mean, summary.low, summary.high) for summary in summaries]
    return np.array([[mean if end is None else end for end in (mean, low, high)] for mean, low, high in ends]).T
