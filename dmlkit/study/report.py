"""The results of a study as Markdown, and what of it is told in a terminal. Nothing is typed by hand."""

from pathlib import Path
from urllib.parse import quote

from dmlkit.evaluation.tables import Rows, as_markdown
from dmlkit.files.atomic import atomic_write
from dmlkit.files.escape import markdown, printable
from dmlkit.files.outputs import writing
from dmlkit.study.duration import spoken_time
from dmlkit.study.plot import plot_study
from dmlkit.study.protocol import MeanInterval, ProtocolResults
from dmlkit.study.record import StudyFailures
from dmlkit.study.results import Difference, JudgedStatement, StudyResults

PLOT = "results.png"
EXPLANATION = """\
Every figure is of classes that were never trained on, from the checkpoint that was best on validation classes. ± and
intervals are 95 % by Student's t over seeds; differences are paired, of runs with the same seed, p by the paired
t-test. "Better than" holds where the interval of the difference lies above 0, does not hold where it lies below 0, and
is not separable at this size where it holds 0; then follows about how many seeds would do, if mean and spread
stayed what they are. Verdicts are one by one, not corrected for their number."""


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
    paragraphs += [_setting(results), f"    {printable(results.command)}"]
    return "\n\n".join(paragraphs)


def write_section(results: StudyResults, folder: Path) -> Path:
    """Write a study's own document and picture into its folder; returns the document."""
    with writing(folder / PLOT), atomic_write(folder / PLOT) as partial:
        plot_study(results, partial)
    document = folder / "results.md"
    write_text(document, f"{study_section(results, PLOT, heading='#')}\n\n{EXPLANATION}")
    return document


def verdict_rows(results: StudyResults) -> Rows:
    """One row a statement of the claim."""
    rows = [["statement", "figure", "ours", "difference", "95 % interval", "p", "verdict"]]
    for judged in results.verdicts:
        metric, more = judged.metric, judged.runs_to_separate
        ours = " vs ".join(_mean(results.variants[name].summary[metric]) for name in (judged.better, judged.than))
        text: str = judged.verdict
        if text.startswith("not separable") and more:
            text += f"; about {more} seeds would do"
        statement = f"{judged.better} better than {judged.than}"
        rows.append([statement, metric, ours, f"{judged.difference:+.4f}", _interval(judged), _p(judged), text])
    return rows


def verdict_lines(results: StudyResults) -> list[str]:
    """One line a statement of the claim, for a terminal."""
    return [
        f"{statement}, {metric}: {difference} ({interval}), {verdict}"
        for statement, metric, _, difference, interval, _, verdict in verdict_rows(results)[1:]
    ]


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


def figure_rows(results: StudyResults) -> Rows:
    """One row a variant with every figure, for a terminal."""
    variants, metrics = results.variants.items(), results.metrics
    rows = [[name, *(_mean(variant.summary[metric]) for metric in metrics)] for name, variant in variants]
    return [["variant", *metrics], *rows]


def variant_rows(results: StudyResults) -> Rows:
    """One row a variant: every figure, and how it differs from the reference."""
    metrics, reference = results.metrics, results.reference
    rows = [["variant", *(cell for name in metrics for cell in (name, f"minus {reference}"))]]
    for name, variant in results.variants.items():
        row = [name]
        for metric in metrics:
            row.append(_mean(variant.summary[metric]))
            change = variant.difference[metric] if variant.difference else None
            row.append(f"{change.difference:+.4f} ({_interval(change)}, p {_p(change)})" if change else "")
        rows.append(row)
    return rows


def tuning_rows(results: StudyResults) -> Rows:
    """One row a variant: what was tried, with the score on validation classes that chose."""
    rows = [["variant", "tried", "chosen"]]
    for name, variant in results.variants.items():
        if variant.tuned:
            tried = ", ".join(f"{label}: {score:.4f}" for label, score in variant.tuned.validation.items())
            rows.append([name, tried, variant.tuned.chosen])
    return rows


def protocol_rows(results: ProtocolResults) -> Rows:
    """One row for each kind of figure and metric: the mean over repeats and half the width of its interval."""
    rows = [["of", "metric", "mean", "95 % interval", *(f"repeat {i}" for i in range(len(results.repeats)))]]
    for kind, metrics in results.summary.items():
        for metric, summary in metrics.items():
            margin = "" if summary.high is None else f"± {summary.high - summary.mean:.4f}"
            values = [f"{repeat[kind][metric]:.4f}" for repeat in results.repeats]
            rows.append([kind, metric, f"{summary.mean:.4f}", margin, *values])
    return rows


def write_text(path: Path, text: str) -> None:
    """Write a document, all or nothing."""
    with writing(path), atomic_write(path) as partial:
        partial.write_text(text + "\n", encoding="utf-8")


def _setting(results: StudyResults) -> str:
    cost, seeds = results.cost, ", ".join(map(str, results.seeds))
    if results.more_seeds:
        seeds += f", up to {results.more_seeds} more while a statement was not separable (its interval allows for that)"
    protocol = "Reality Check protocol, 4 models a run" if results.protocol == "reality_check" else "Official split"
    return (
        f"{protocol}; seeds {seeds}; {cost.models} models, {spoken_time(cost.seconds)} of training and "
        f"validation on {markdown('; '.join(cost.on))}. To repeat it:"
    )


def _mean(summary: MeanInterval) -> str:
    mean, high = summary.mean, summary.high
    return f"{mean:.4f}" if high is None else f"{mean:.4f} ± {high - mean:.4f}"


def _interval(change: Difference | JudgedStatement) -> str:
    return "no interval" if change.low is None else f"{change.low:+.4f} .. {change.high:+.4f}"


def _p(change: Difference | JudgedStatement) -> str:
    return f"{change.p_value:.4f}"
