"""Tables of the results of studies and protocols, for Markdown, for a terminal and for LaTeX."""

import re
from collections.abc import Iterable, Mapping
from itertools import compress
from pathlib import Path

from dmlkit.evaluation.compare import p_text
from dmlkit.files.escape import Rows, as_latex, latex, printable
from dmlkit.files.outputs import write_output
from dmlkit.run_folder.documents import PairedDifference
from dmlkit.study.definition.file import best_values
from dmlkit.study.verdicts import JudgedStatement, MeanInterval, StudyResults, VariantResults, end_text


def verdict_rows(results: StudyResults, *, has_edges: bool = True) -> Rows:
    """Return one row per statement of the claim and metric; the verdict comes early, where a narrow page shows it."""
    rows = [["statement", "metric", "verdict", "difference", "95 % interval", "means", "p (Holm's)"]]
    for judged in results.verdicts:
        metric = judged.metric
        means = " vs ".join(_mean(results.variants[name].summary[metric]) for name in (judged.better, judged.than))
        p_value = f"{p_text(judged.p_value)} ({p_text(judged.corrected_p_value)})"
        text = verdict_text(judged, results.variants, has_edges=has_edges)
        rows.append([judged.text, metric, text, f"{judged.difference:+.4f}", _interval(judged), means, p_value])
    return rows


def statement_rows(studies: Mapping[str, StudyResults]) -> Rows:
    """Return one row per statement and study, with one column per metric.

    The rows of a statement are adjacent, and the first names it. A single study is not named.
    """
    cells_of: dict[str, dict[str, dict[str, str]]] = {}
    for name, results in studies.items():
        for judged in results.verdicts:
            cells_of.setdefault(judged.text, {}).setdefault(name, {})[judged.metric] = _difference_cell(judged)
    metrics = dict.fromkeys(metric for rows in cells_of.values() for cells in rows.values() for metric in cells)
    rows = [["statement", "study", *metrics]]
    for statement, group in cells_of.items():
        for index, (name, cells) in enumerate(group.items()):
            rows.append(["" if index else statement, name, *(cells.get(metric, "") for metric in metrics)])
    return rows if len(studies) > 1 else [[first, *rest] for first, _, *rest in rows]


def _difference_cell(judged: JudgedStatement) -> str:
    half = "" if judged.high is None else f" ± {judged.high - judged.difference:.4f}"
    words: dict[str, str] = {"not separable at this size": "", "makes no difference": "no difference"}
    word = words.get(judged.verdict, judged.verdict)
    is_lost = judged.corrected_verdict != judged.verdict
    return ", ".join(filter(None, (f"{judged.difference:+.4f}{half}", word, "not after Holm" * is_lost)))


def disagreements(studies: Mapping[str, StudyResults]) -> list[str]:
    """Return the statements for which the metrics lead to different decisions after the correction.

    The decisions are "holds", "does not hold" and none. A single study is not named.
    """
    decided: dict[str, set[str | None]] = {}
    for name, results in studies.items():
        for judged in results.verdicts:
            decision = judged.corrected_verdict if judged.corrected_verdict in ("holds", "does not hold") else None
            decided.setdefault(f"{judged.text} ({name})" if len(studies) > 1 else judged.text, set()).add(decision)
    return [statement for statement, decisions in decided.items() if len(decisions) > 1]


def trained_rows(results: StudyResults) -> Rows:
    """Return one row per variant: the mean of every metric, results before training and tuned values.

    Results before training have no column if they are the same for all variants, and tuned values none if none were.
    """
    before = [pretrained_text(variant) for variant in results.variants.values()]
    chosen = [_chosen(variant) for variant in results.variants.values()]
    columns = [["before training", *before]] * (len(set(before)) > 1) + [["chosen", *chosen]] * any(chosen)
    return [[*row, *cells] for row, *cells in zip(mean_rows(results), *columns, strict=True)]


def verdict_text(judged: JudgedStatement, variants: Mapping[str, VariantResults], *, has_edges: bool = True) -> str:
    """Return a verdict with its caveats, among them which values were tuned at the edge."""
    is_lost = judged.corrected_verdict != judged.verdict
    parts = [f"{judged.verdict}, but not after Holm's correction" if is_lost else judged.verdict]
    pairs = len(variants[judged.better].runs.keys() & variants[judged.than].runs.keys())
    # the estimate knows no correction for added seeds: it may be below the number of seeds that did not decide
    if judged.verdict == "not separable at this size" and (judged.runs_to_separate or 0) > pairs:
        parts.append(f"about {judged.runs_to_separate} seeds would decide")
    if judged.verdict == "not separable at this size" and judged.classes and judged.runs_to_separate is None:
        parts.append(f"no number of seeds would decide with {judged.classes} test classes")
    if judged.not_trained:
        floors = (f"{name} ({_pretrained(variants[name], judged.metric)})" for name in judged.not_trained)
        parts.append(f"below the network before training: {', '.join(floors)}")
    if has_edges:
        parts.append(edge_text(judged.at_edge, variants))
    return "; ".join(filter(None, parts))


def edge_text(at_edge: Iterable[str], variants: Mapping[str, VariantResults]) -> str:
    """Return which values of some variants were tuned at the edge of their grids; empty without variants."""
    names_at: dict[str, list[str]] = {}
    for name in at_edge:
        tuned = variants[name].tuned
        names_at.setdefault(end_text(tuned.edge) if tuned else "", []).append(name)
    ends = ", ".join(f"{' and '.join(names)} ({end})" for end, names in names_at.items())
    return f"tuned at the edge: {ends}" if ends else ""


def figure_rows(results: StudyResults) -> Rows:
    """Return the metrics of every variant for a terminal: best and last checkpoint, and before training."""
    metrics, rows = results.metrics, [["variant", "checkpoint", *results.metrics]]
    for name, variant in results.variants.items():
        rows.append([name, "best", *(_mean(variant.summary[metric]) for metric in metrics)])
        if variant.last:
            rows.append(["", "last", *(_last(variant, metric) for metric in metrics)])
        if variant.pretrained is not None:
            rows.append(["", "pretrained", *(_pretrained(variant, metric) for metric in metrics)])
    return rows


def mean_rows(results: StudyResults) -> Rows:
    """Return one row per variant: the mean of every metric over seeds and half the width of its interval."""
    rows = [["variant", *results.metrics]]
    for name, variant in results.variants.items():
        rows.append([name, *(_mean(variant.summary[metric]) for metric in results.metrics)])
    return rows


def variant_rows(results: StudyResults) -> Rows:
    """Return one row per variant: every metric, its difference from the reference, and additional results."""
    variants = results.variants.values()
    is_known = any(variant.last for variant in variants), any(variant.pretrained is not None for variant in variants)
    extra = dict(compress({"last": _last, "pretrained": _pretrained}.items(), is_known))
    head = [cell for name in results.metrics for cell in (name, f"minus {results.reference}", *extra)]
    rows = [["variant", *head]]
    for name, variant in results.variants.items():
        row = [name]
        for metric in results.metrics:
            change = variant.difference.get(metric) if variant.difference else None
            difference = f"{change.difference:+.4f} ({_interval(change)}, p {p_text(change.p_value)})" if change else ""
            row += [_mean(variant.summary[metric]), difference, *(cell(variant, metric) for cell in extra.values())]
        rows.append(row)
    return rows


def tuning_rows(results: StudyResults) -> Rows:
    """Return one row per variant: the tried values with their scores on validation classes, and the chosen one."""
    rows = [["variant", "tried", "chosen"]]
    for name, variant in results.variants.items():
        if variant.tuned:
            tried = ", ".join(f"{label}: {score:.4f}" for label, score in variant.tuned.validation.items())
            rows.append([name, tried, _chosen(variant)])
    return rows


def _mean(summary: MeanInterval) -> str:
    mean, high = summary.mean, summary.high
    return f"{mean:.4f}" if high is None else f"{mean:.4f} ± {high - mean:.4f}"


def _last(variant: VariantResults, metric: str) -> str:
    values = [figures[metric] for figures in variant.last.values() if metric in figures]
    return _mean(MeanInterval.of(values)) if values else ""


def pretrained_text(variant: VariantResults) -> str:
    """Return all results of a variant's network before training; empty if it was not measured."""
    return ", ".join(f"{metric} {value:.4f}" for metric, value in (variant.pretrained or {}).items())


def _pretrained(variant: VariantResults, metric: str) -> str:
    floor = (variant.pretrained or {}).get(metric)
    return "" if floor is None else f"{floor:.4f}"


def _chosen(variant: VariantResults) -> str:
    return "; ".join(filter(None, (variant.tuned.chosen, end_text(variant.tuned.edge)))) if variant.tuned else ""


def _interval(change: PairedDifference) -> str:
    return "no interval" if change.low is None else f"{change.low:+.4f} .. {change.high:+.4f}"


MARK = "% Written by: dmlkit report"  # start of the first line, which also has the arguments
NEEDS = r"""% In the preamble: \usepackage{array,booktabs}. Where the tables belong: \input{FILE}.
% Names in letters other than Latin need LuaLaTeX or XeLaTeX, and a font that has them."""
TEXT_COLUMN = r">{\raggedright\arraybackslash}p{0.2\linewidth}"


def write_tables(studies: Mapping[str, StudyResults], path: Path, arguments: str) -> None:
    """Write the tables of studies into one file, atomically; its first line has the arguments of the command."""
    tables = [table for name, results in studies.items() for table in study_tables(name, results)]
    write_output(path, "\n\n".join([f"{MARK} {printable(arguments)}\n{NEEDS}", *tables]) + "\n")


def study_tables(name: str, results: StudyResults) -> list[str]:
    """Return a table of variants and metrics, ``tab:NAME``, and of the verdicts, if any, ``tab:NAME-verdicts``."""
    label = re.sub(r"[^A-Za-z0-9.:_-]", lambda match: f"-{ord(match[0]):x}", name)  # two names have two labels
    claim = latex(results.claim)
    counts = sorted({len(variant.runs) for variant in results.variants.values()})
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    figures = f"Mean over {seeds} seeds and half the width of its 95\\,\\% interval"
    if counts == [1]:
        figures = "Results with one seed"
    means = as_latex(mean_rows(results), columns="l" + "r" * len(results.metrics), bold=best_cells(results))
    tables = [_table(means, f"{claim}. {figures}.", label)]
    if results.verdicts:
        at_edge = dict.fromkeys(name for judged in results.verdicts for name in judged.at_edge)
        edges = latex(edge_text(at_edge, results.variants))  # once, so that the table fits a page
        # without the means, which the first table has
        rows = [[*row[:2], *row[3:5], row[6], row[2]] for row in verdict_rows(results, has_edges=False)]
        text = as_latex(rows, columns=f"{TEXT_COLUMN}lrrr{TEXT_COLUMN}")
        text = f"\\footnotesize\\setlength{{\\tabcolsep}}{{3pt}}\n{text}"  # fits a page with 16 cm of text
        caption = f"{claim}: differences, paired over seeds, and verdicts."
        tables.append(_table(text, caption + (edges and f" {edges[0].upper()}{edges[1:]}."), f"{label}-verdicts"))
    return tables


def best_cells(results: StudyResults) -> set[tuple[int, int]]:
    """Return the cells of `mean_rows` with the best mean of each metric; means with the same printed digits tie.

    A metric that only describes embeddings, e.g. ``norm``, has no best mean.
    """
    best: set[tuple[int, int]] = set()
    for column, metric in enumerate(results.metrics, 1):
        if (best_of := best_values(metric)) != "none":
            means = [round(variant.summary[metric].mean, 4) for variant in results.variants.values()]
            top = min(means) if best_of == "smallest" else max(means)
            best |= {(row, column) for row, mean in enumerate(means, 1) if mean == top}
    return best


def _table(tabular: str, caption: str, label: str) -> str:
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{caption}}}", rf"\label{{tab:{label}}}", r"\medskip"]
    return "\n".join([*lines, tabular, r"\end{table}"])
