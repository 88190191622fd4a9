"""The results of a study as Markdown, and what of it is told in a terminal. Nothing is typed by hand."""

from collections import Counter
from collections.abc import Mapping, Sequence
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
from dmlkit.study.results import StudyResults
from dmlkit.study.variant_results import Difference, VariantResults
from dmlkit.study.verdicts import JudgedStatement

PLOT = "results.png"
EXPLANATION = """\
Every figure is of classes that were never trained on, from the checkpoint that was best on validation classes; "last"
is the one after all epochs. ± and intervals are 95 % by Student's t over seeds; differences are paired, of runs with
the same seed, p by the paired t-test, in brackets as Holm corrects it for the number of statements of its study.
"Better than" holds where the interval of the difference lies above 0, does not hold where it lies below 0, and is not
separable at this size where it holds 0; then follows about how many seeds would do, if mean and spread stayed what they
are. It is said where a verdict does not stand the correction, and where the value that a variant was tuned to is the
lowest or highest that was tried. A variant that lies below its own network before training is not trained, and two with
the same figures on every seed are equal by construction: such a difference says nothing of the claim."""


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
    rows = [["statement", "figure", "ours", "difference", "95 % interval", "p (Holm's)", "verdict"]]
    for judged in results.verdicts:
        metric = judged.metric
        ours = " vs ".join(_mean(results.variants[name].summary[metric]) for name in (judged.better, judged.than))
        p_value = _p(judged) if judged.corrected_p_value is None else f"{_p(judged)} ({judged.corrected_p_value:.4f})"
        statement, text = f"{judged.better} better than {judged.than}", verdict_text(judged, results.variants)
        rows.append([statement, metric, ours, f"{judged.difference:+.4f}", _interval(judged), p_value, text])
    return rows


def verdict_text(judged: JudgedStatement, variants: Mapping[str, VariantResults]) -> str:
    """A verdict with what a reader must know of it."""
    parts: list[str] = [judged.verdict]
    if judged.corrected_verdict not in (None, judged.verdict):
        parts[0] += ", but not after Holm's correction"
    if judged.verdict == "not separable at this size" and judged.runs_to_separate:
        parts.append(f"about {judged.runs_to_separate} seeds would do")
    if judged.not_trained:
        floors = (f"{name} ({_untrained(variants[name], judged.metric)})" for name in judged.not_trained)
        parts.append(f"below the network before training: {', '.join(floors)}")
    if judged.at_edge:
        names: dict[str, list[str]] = {}
        for name in judged.at_edge:
            names.setdefault(_ends(variants[name]), []).append(name)
        ends = (f"{' and '.join(both)} ({end})" for end, both in names.items())
        parts.append(f"tuned at the edge: {', '.join(ends)}")
    return "; ".join(parts)


def counted_verdicts(studies: Sequence[StudyResults]) -> str:
    """How many statements have which verdict, in a sentence; and how many of them stand the correction."""
    judged = [one for results in studies for one in results.verdicts]
    counts = Counter(one.verdict for one in judged)
    told = [f"{counts['holds']} hold", f"{counts['does not hold']} do not"]
    told.append(f"{counts['not separable at this size']} are not separable at this size")
    if counts["not trained"]:
        told.append(f"{counts['not trained']} compare what is not trained")
    if counts["equal by construction"]:
        told.append(f"{counts['equal by construction']} are equal by construction")
    text = f"Of {len(judged)} statements {', '.join(told[:-1])}, and {told[-1]}."
    lost = sum(one.corrected_verdict not in (None, one.verdict) for one in judged)
    return f"{text} Of those decided {lost} do not stand Holm's correction." if lost else text


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
    """Every variant's figures, for a terminal: of the best and the last checkpoint, and from before training."""
    metrics, rows = results.metrics, [["variant", "of", *results.metrics]]
    for name, variant in results.variants.items():
        rows.append([name, "best", *(_mean(variant.summary[metric]) for metric in metrics)])
        if variant.last:
            rows.append(["", "last", *(_last(variant, metric) for metric in metrics)])
        if variant.untrained is not None:
            rows.append(["", "untrained", *(_untrained(variant, metric) for metric in metrics)])
    return rows


def variant_rows(results: StudyResults) -> Rows:
    """One row a variant: every figure, how it differs from the reference, and what lies beside it."""
    metrics, reference, variants = results.metrics, results.reference, results.variants.values()
    beside = {"last": any(variant.last for variant in variants)}
    beside["untrained"] = any(variant.untrained is not None for variant in variants)
    told = [name for name, is_known in beside.items() if is_known]
    rows = [["variant", *(cell for name in metrics for cell in (name, f"minus {reference}", *told))]]
    for name, variant in results.variants.items():
        row = [name]
        for metric in metrics:
            row.append(_mean(variant.summary[metric]))
            change = variant.difference.get(metric) if variant.difference else None
            row.append(f"{change.difference:+.4f} ({_interval(change)}, p {_p(change)})" if change else "")
            others = {"last": _last(variant, metric), "untrained": _untrained(variant, metric)}
            row += [others[name] for name in told]
        rows.append(row)
    return rows


def tuning_rows(results: StudyResults) -> Rows:
    """One row a variant: what was tried, with the score on validation classes that chose."""
    rows = [["variant", "tried", "chosen"]]
    for name, variant in results.variants.items():
        if variant.tuned:
            tried = ", ".join(f"{label}: {score:.4f}" for label, score in variant.tuned.validation.items())
            rows.append([name, tried, "; ".join(filter(None, (variant.tuned.chosen, _ends(variant))))])
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


def _last(variant: VariantResults, metric: str) -> str:
    values = [figures[metric] for figures in variant.last.values() if metric in figures]
    return _mean(MeanInterval.of(values)) if values else ""


def _untrained(variant: VariantResults, metric: str) -> str:
    floor = (variant.untrained or {}).get(metric)
    return "" if floor is None else f"{floor:.4f}"


def _ends(variant: VariantResults) -> str:
    edge = variant.tuned.edge if variant.tuned else {}
    return ", ".join(f"{key} the {end} tried" for key, end in edge.items())


def _interval(change: Difference | JudgedStatement) -> str:
    return "no interval" if change.low is None else f"{change.low:+.4f} .. {change.high:+.4f}"


def _p(change: Difference | JudgedStatement) -> str:
    return f"{change.p_value:.4f}"
