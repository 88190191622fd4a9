"""The tables of a study's results, for Markdown and for a terminal."""

from collections.abc import Mapping

from dmlkit.evaluation.tables import Rows
from dmlkit.study.protocol import MeanInterval, ProtocolResults
from dmlkit.study.results import StudyResults
from dmlkit.study.variant_results import Difference, VariantResults
from dmlkit.study.verdicts import JudgedStatement


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


def verdict_lines(results: StudyResults) -> list[str]:
    """One line a statement of the claim, for a terminal."""
    return [
        f"{statement}, {metric}: {difference} ({interval}), {verdict}"
        for statement, metric, _, difference, interval, _, verdict in verdict_rows(results)[1:]
    ]


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
