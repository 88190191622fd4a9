"""Tables of studies for LaTeX: the metrics of every variant, and the verdicts on the statements."""

import re
from collections.abc import Mapping
from pathlib import Path

from dmlkit.evaluation.tables import as_latex
from dmlkit.files.atomic import write_text
from dmlkit.files.escape import latex, printable
from dmlkit.files.outputs import check_output, head_of, writing
from dmlkit.metrics.distribution import NormConfig, SpectrumConfig, SpreadConfig
from dmlkit.study.definition.file import is_error_rate
from dmlkit.study.findings.results import StudyResults
from dmlkit.study.reports.tables import mean_rows, verdict_rows

MARK = "% Written by: dmlkit report"  # start of the first line, which also has the arguments
NEEDS = r"""% In the preamble: \usepackage{array,booktabs}. Where the tables belong: \input{FILE}.
% Names in letters other than Latin need LuaLaTeX or XeLaTeX, and a font that has them."""
TEXT_COLUMN = r">{\raggedright\arraybackslash}p{0.2\linewidth}"
DESCRIPTIVE = {name for config in (SpreadConfig(), SpectrumConfig(), NormConfig()) for name in config.names()}
"""Metrics of which neither the largest nor the smallest is best."""


def check_tables(path: Path) -> None:
    """Check that the file of the tables may be written.

    Raises:
        UserError: dmlkit did not write the existing file.
    """
    check_output(path, lambda path: head_of(path).startswith(MARK.encode()))


def write_tables(studies: Mapping[str, StudyResults], path: Path, arguments: str) -> None:
    """Write the tables of studies into one file, atomically; its first line has the arguments of the command."""
    tables = [table for name, results in studies.items() for table in study_tables(name, results)]
    text = "\n\n".join([f"{MARK} {printable(arguments)}\n{NEEDS}", *tables])
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        write_text(path, f"{text}\n")


def study_tables(name: str, results: StudyResults) -> list[str]:
    """Return a table of variants and metrics, and one of the verdicts if the study has statements.

    Args:
        name: name of the study, for the labels ``tab:NAME`` and ``tab:NAME-verdicts``.
    """
    label, claim = re.sub(r"[^A-Za-z0-9.:_-]", "-", name), latex(results.claim)
    counts = sorted({len(variant.runs) for variant in results.variants.values()})
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    figures = f"Mean over {seeds} seeds and half the width of its 95\\,\\% interval"
    if counts == [1]:
        figures = "Results with one seed"
    rows = mean_rows(results)
    columns = "l" + "r" * len(results.metrics)
    tables = [_table(as_latex(rows, columns=columns, bold=best_cells(results)), f"{claim}. {figures}.", label)]
    if results.verdicts:
        rows = [  # without the means, which the first table has
            [*row[:2], *row[3:5], row[6], row[2]] for row in verdict_rows(results)
        ]
        text = as_latex(rows, columns=f"{TEXT_COLUMN}lrrr{TEXT_COLUMN}")
        text = f"\\footnotesize\\setlength{{\\tabcolsep}}{{3pt}}\n{text}"  # fits a page with 16 cm of text
        tables.append(_table(text, f"{claim}: differences, paired over seeds, and verdicts.", f"{label}-verdicts"))
    return tables


def best_cells(results: StudyResults) -> set[tuple[int, int]]:
    """Return the cells of `mean_rows` with the best mean of each metric; means with the same printed digits tie.

    A metric that only describes embeddings, e.g. ``norm``, has no best mean.
    """
    best: set[tuple[int, int]] = set()
    for column, metric in enumerate(results.metrics, 1):
        if metric.rpartition(" ")[2] not in DESCRIPTIVE:  # without the kind: separated map@r
            means = [round(variant.summary[metric].mean, 4) for variant in results.variants.values()]
            top = min(means) if is_error_rate(metric) else max(means)
            best |= {(row, column) for row, mean in enumerate(means, 1) if mean == top}
    return best


def _table(tabular: str, caption: str, label: str) -> str:
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{caption}}}", rf"\label{{tab:{label}}}", r"\medskip"]
    return "\n".join([*lines, tabular, r"\end{table}"])
