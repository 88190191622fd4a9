"""Figures as tables: in the terminal, as Markdown, as LaTeX."""

from collections.abc import Sequence

from dmlkit.evaluation.compare import Line
from dmlkit.evaluation.report import Report
from dmlkit.files.escape import latex, markdown

Rows = list[list[str]]


def as_markdown(rows: Rows) -> str:
    r"""A Markdown table.

    Example:
        >>> print(as_markdown([["run", "map@r"], ["a|b", "0.5"]]))
        | run | map@r |
        | --- | --- |
        | a\|b | 0.5 |
    """
    cells = [[markdown(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [cells[0], ["---"] * len(cells[0]), *cells[1:]])


def as_latex(rows: Rows) -> str:
    r"""A LaTeX ``tabular`` with the rules of booktabs.

    Example:
        >>> print(as_latex([["run", "map@r"], ["a_b", "50 %"]]))
        \begin{tabular}{ll}
        \toprule
        run & map@r \\
        \midrule
        a\_b & 50 \% \\
        \bottomrule
        \end{tabular}
    """
    lines = [" & ".join(latex(cell) for cell in row) + r" \\" for row in rows]
    head = [rf"\begin{{tabular}}{{{'l' * len(rows[0])}}}", r"\toprule", lines[0], r"\midrule"]
    return "\n".join([*head, *lines[1:], r"\bottomrule", r"\end{tabular}"])


def metric_rows(report: Report, definitions: dict[str, str]) -> Rows:
    """One row a metric, of a report of ``dmlkit eval``."""
    rows = [["metric", "value", "95 % interval", "definition"]]
    for name, value in report.metrics.items():
        interval = report.intervals.get(name)
        between = f"{interval[0]:.4f} .. {interval[1]:.4f}" if interval else ""
        rows.append([name, f"{value:.4f}", between, definitions[name]])
    return rows


def comparison_rows(lines: Sequence[Line]) -> Rows:
    """One row a metric and model, with a dash where a model lacks it; what a later one differs from the first by,
    where they share their queries."""
    rows = [["metric", "run", "value", "95 % interval", "difference", "95 % interval of it", "p"]]
    for name in dict.fromkeys(name for line in lines for name in line.report.metrics):
        for line in lines:
            if name not in line.report.metrics:
                rows.append([name, line.name, "-", "", "", "", ""])
                continue
            interval = line.report.intervals.get(name)
            row = [name, line.name, f"{line.report.metrics[name]:.4f}"]
            row.append(f"{interval[0]:.4f} .. {interval[1]:.4f}" if interval else "")
            change = line.changes.get(name)
            if change is None:
                rows.append([*row, "", "", ""])
            else:
                between = f"{change.low:+.4f} .. {change.high:+.4f}"
                rows.append([*row, f"{change.difference:+.4f}", between, f"{change.p_value:.4f}"])
    return rows
