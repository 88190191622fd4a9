"""The results of a study as Markdown, and what of it is told in a terminal. Nothing is typed by hand."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from dmlkit.errors import UserError
from dmlkit.evaluation.tables import as_markdown
from dmlkit.files.atomic import atomic_write
from dmlkit.files.escape import markdown, printable
from dmlkit.files.outputs import writing
from dmlkit.study.findings.results import StudyResults
from dmlkit.study.record import StudyFailures
from dmlkit.study.reports.plot import plot_study
from dmlkit.study.reports.tables import (
    format_duration,
    statement_rows,
    trained_rows,
    tuning_rows,
    variant_rows,
    verdict_rows,
)

PLOT = "results.png"
# What one statement of a verdict does, and what several do
COUNTED = {
    "holds": ("holds", "hold"),
    "does not hold": ("does not", "do not"),
    "makes no difference": ("makes no difference", "make no difference"),
    "not separable at this size": ("is not separable at this size", "are not separable at this size"),
    "not trained": ("compares what is not trained", "compare what is not trained"),
    "equal by construction": ("is equal by construction", "are equal by construction"),
}
ALWAYS_COUNTED = {"holds", "does not hold", "not separable at this size"}
EXPLANATION = """\
Every figure is of classes that were never trained on, from the checkpoint that was best on validation classes; "last"
is the one after all epochs. ± and intervals are 95 % by Student's t over seeds; differences are paired, of the seeds
that both variants have, so that the difference of two means may be another. p is by the paired t-test, in brackets as
Holm corrects it for the number of statements of its study. "Better than" holds where the interval of the difference
lies above 0, does not hold where it lies below 0, and where it holds 0 makes no difference if all of it is within what
the study calls negligible, else it is not separable at this size; then follows about how many seeds would do, if mean
and spread stayed what they are. It is said where a verdict does not stand the correction, and where the value that a
variant was tuned to is the lowest or highest that was tried. A variant that lies below its own network before training
is not trained, and two with the same figures on every seed are equal by construction: such a difference says nothing of
the claim."""


def study_section(results: StudyResults, plot: str, *, heading: str) -> str:
    """One study as Markdown: claim, verdicts, figures, cost and command.

    Args:
        results: of ``results.json``.
        plot: where the picture is, from the document.
        heading: ``#`` or ``##``.
    """
    claim, source = (
        markdown(text) for text in (results.claim, ", ".join(filter(None, (results.paper, results.table))))
    )
    paragraphs = [f"{heading} {claim}", *([f"From: {source}."] if source else [])]
    paragraphs += [markdown(line) for line in missing_lines(results)]
    if results.verdicts:
        paragraphs.append(as_markdown(verdict_rows(results)))
    paragraphs += [as_markdown(variant_rows(results)), f"![{claim}]({quote(plot)})"]
    if any(variant.tuned for variant in results.variants.values()):
        seeds = f"seeds {', '.join(map(str, results.tune_seeds))}" if results.tune_seeds else "the first seed"
        trials = {len(variant.tuned.validation) for variant in results.variants.values() if variant.tuned}
        budget = "with the same number of trials" if len(trials) == 1 else "free to try as many values"
        text = f"Tuned with {seeds} on validation classes, every variant {budget}:"
        paragraphs += [text, as_markdown(tuning_rows(results))]
    return "\n\n".join([*paragraphs, *repeat_paragraphs(results)])


def repeat_paragraphs(results: StudyResults) -> list[str]:
    """How a study was run, and the command that repeats it."""
    return [_setting(results), f"    {printable(results.command)}"]


def write_section(results: StudyResults, folder: Path) -> Path:
    """Write a study's own document and picture into its folder; returns the document."""
    with writing(folder / PLOT), atomic_write(folder / PLOT) as partial:
        plot_study(results, partial)
    document = folder / "results.md"
    write_text(document, f"{study_section(results, PLOT, heading='#')}\n\n{EXPLANATION}")
    return document


def counted_verdicts(studies: Sequence[StudyResults]) -> str:
    """How many statements have which verdict, in a sentence; and how many of them stand the correction."""
    judged = [one for results in studies for one in results.verdicts]
    counts = Counter(one.verdict for one in judged)
    told = [
        f"{counts[verdict]} {one if counts[verdict] == 1 else more}"
        for verdict, (one, more) in COUNTED.items()
        if counts[verdict] or verdict in ALWAYS_COUNTED
    ]
    text = f"Of {len(judged)} statements {', '.join(told[:-1])}, and {told[-1]}."
    lost = sum(one.corrected_verdict not in (None, one.verdict) for one in judged)
    return (
        f"{text} Of those decided {lost} {'does' if lost == 1 else 'do'} not stand Holm's correction." if lost else text
    )


def missing_lines(results: StudyResults) -> list[str]:
    """What a study that is not complete lacks, and which runs failed."""
    lacks = [
        f"{name} (seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))})" if name in results.variants else name
        for name, seeds in results.missing.items()
    ]
    lines = (
        [f"Not complete: missing are {'; '.join(lacks)}. Differences are of the seeds that both have."] if lacks else []
    )
    return lines + [f"Failed: {line}" for line in StudyFailures(failed=results.failed).lines()]


def write_text(path: Path, text: str) -> None:
    """Write a document, all or nothing."""
    with writing(path), atomic_write(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")


def _setting(results: StudyResults) -> str:
    cost, seeds = results.cost, ", ".join(map(str, results.seeds))
    if results.more_seeds:
        seeds += f", up to {results.more_seeds} more while a statement was not separable (its interval allows for that)"
    if results.rotate_folds:
        seeds += ", each with another fold of the training classes for validation"
    if results.negligible:
        seeds += f"; differences up to {results.negligible:g} make none"
    protocol = "Reality Check protocol, 4 models a run" if results.protocol == "reality_check" else "Official split"
    return (
        f"{protocol}; seeds {seeds}; {cost.models} models, {format_duration(cost.seconds)} of training and "
        f"validation on {markdown('; '.join(cost.on))}. To repeat it:"
    )


def of_paper(studies: Mapping[str, StudyResults], paper: str) -> dict[str, StudyResults]:
    """The studies that have statements of a paper: whole where all are, else with these and the variants they name.

    The p-values stay corrected for all statements of a study.

    Args:
        studies: by name.
        paper: as the studies' files name it under ``expect``.

    Raises:
        UserError: there is none.
    """
    found: dict[str, StudyResults] = {}
    for name, results in studies.items():
        verdicts = tuple(judged for judged in results.verdicts if judged.paper == paper)
        named = {variant for judged in verdicts for variant in (judged.better, judged.than)}
        variants = {variant: one for variant, one in results.variants.items() if variant in named}
        if verdicts and verdicts == results.verdicts:
            found[name] = results
        elif verdicts:
            found[name] = results.model_copy(update={"verdicts": verdicts, "variants": variants, "axis": None})
    if not found:
        papers = dict.fromkeys(judged.paper for results in studies.values() for judged in results.verdicts)
        known = ", ".join(filter(None, papers)) or "none; add e.g. paper: mpa to a statement under expect"
        raise UserError(f"--paper {paper}: no statement of these studies is of that paper; expected one of {known}")
    return found


def paper_paragraphs(studies: Mapping[str, StudyResults], plots: Mapping[str, str]) -> list[str]:
    """What holds of a paper, study by study: statements, figures beside them, pictures and commands.

    Args:
        studies: of `of_paper`.
        plots: where the picture of each is, from the document.
    """
    told = [as_markdown(statement_rows(studies)), as_markdown(trained_rows(studies)), EXPLANATION]
    for name, results in studies.items():
        claim = markdown(results.claim)
        setting, command = repeat_paragraphs(results)
        told += [f"**{markdown(name)}**: {claim}.", f"![{claim}]({quote(plots[name])})", setting, command]
    return told
