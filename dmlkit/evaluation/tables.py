"""Tables of metrics and comparisons for the terminal, in Markdown, and in LaTeX."""

import re
from collections.abc import Collection, Sequence
from itertools import product

from dmlkit.evaluation.compare import Line
from dmlkit.evaluation.report import Report
from dmlkit.files.escape import latex, markdown

Rows = list[list[str]]
NUMBER = r"[+-]?[0-9]+(?:\.[0-9]+)?"
FIGURE = re.compile(rf"({NUMBER})(?: (±|\.\.) ({NUMBER}))?")  # a number, one with its margin, or an interval
LATEX_WORDS = {"±": r"$\pm$", "..": "to"}


def as_markdown(rows: Rows) -> str:
    r"""Format rows as a Markdown table.

    Example:
        >>> print(as_markdown([["run", "map@r"], ["a|b", "0.5"]]))
        | run | map@r |
        | --- | --- |
        | a\|b | 0.5 |
    """
    cells = [[markdown(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [cells[0], ["---"] * len(cells[0]), *cells[1:]])


def as_latex(rows: Rows, *, columns: str = "", bold: Collection[tuple[int, int]] = ()) -> str:
    r"""Format rows as a LaTeX ``tabular`` with the rules of booktabs; negative numbers get a minus sign, not a hyphen.

    Args:
        columns: columns of the tabular. Default: all are left-aligned.
        bold: cells whose number is bold, as indices of row and column.

    Example:
        >>> print(as_latex([["run", "map@r"], ["a_b", "-0.5 ± 0.1"]], bold=[(1, 1)]))
        \begin{tabular}{ll}
        \toprule
        run & map@r \\
        \midrule
        a\_b & \textbf{$-$0.5} $\pm$ 0.1 \\
        \bottomrule
        \end{tabular}
    """
    cells = [[_latex_cell(cell, (i, j) in bold) for j, cell in enumerate(row)] for i, row in enumerate(rows)]
    lines = [" & ".join(row) + r" \\" for row in cells]
    head = [rf"\begin{{tabular}}{{{columns or 'l' * len(rows[0])}}}", r"\toprule", lines[0], r"\midrule"]
    return "\n".join([*head, *lines[1:], r"\bottomrule", r"\end{tabular}"])


def _latex_cell(text: str, is_bold: bool) -> str:
    found = FIGURE.fullmatch(text)
    if found is None:
        return latex(text)
    number, word, other = ((part or "").replace("-", "$-$") for part in found.groups())
    number = rf"\textbf{{{number}}}" if is_bold else number
    return f"{number} {LATEX_WORDS[word]} {other}" if word else number


def p_text(p_value: float | None) -> str:
    """Format a p-value with four digits; none is zero. Without a p-value the text is empty.

    Example:
        >>> p_text(0.03125), p_text(1.2e-7), p_text(None)
        ('0.0312', '< 0.0001', '')
    """
    if p_value is None:
        return ""
    return "< 0.0001" if p_value < 5e-5 else f"{p_value:.4f}"


def metric_rows(report: Report, definitions: dict[str, str]) -> Rows:
    """Return one row per metric of a report of ``dmlkit eval``."""
    rows = [["metric", "value", "95 % interval", "definition"]]
    for name, value in report.metrics.items():
        interval = report.intervals.get(name)
        between = f"{interval[0]:.4f} .. {interval[1]:.4f}" if interval else ""
        rows.append([name, f"{value:.4f}", between, definitions[name]])
    return rows


def comparison_rows(lines: Sequence[Line]) -> Rows:
    """Return one row per metric and model, with the difference from the first model if both have the same queries.

    A dash stands for a metric that a model does not have.
    """
    rows = [["metric", "run", "value", "95 % interval", "difference", "95 % interval of it", "p", "Holm's p"]]
    names = dict.fromkeys(name for line in lines for name in line.report.metrics)
    for name, line in product(names, lines):
        interval, value = line.report.intervals.get(name), line.report.metrics.get(name)
        between = f"{interval[0]:.4f} .. {interval[1]:.4f}" if interval else ""
        row, change = [name, line.name, "-" if value is None else f"{value:.4f}", between], line.changes.get(name)
        if change:
            row += [f"{change.difference:+.4f}", f"{change.low:+.4f} .. {change.high:+.4f}" if change.ends else ""]
            row += [p_text(change.p_value), p_text(line.corrected[name])]
        rows.append([*row, *([] if change else [""] * 4)])
    return rows


def narrow_rows(lines: Sequence[Line]) -> tuple[Rows, Rows]:
    """Split `comparison_rows` into two tables for a terminal of 80 columns: values and differences."""
    rows = comparison_rows(lines)
    values, (_, *differences) = [row[:4] for row in rows], [[*row[:2], *row[4:]] for row in rows if row[4]]
    head = ["metric", "run", "difference, 95 % interval", "p", "Holm's p"]
    body = [[*row[:2], f"{row[2]}  {row[3] or 'no interval'}", *row[4:]] for row in differences]
    return values, [head, *body] if body else []
