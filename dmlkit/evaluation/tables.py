"""Figures as tables: in the terminal, as Markdown, as LaTeX."""

from collections.abc import Sequence

from dmlkit.evaluation.compare import Result
from dmlkit.evaluation.report import Report
from dmlkit.evaluation.significance import Comparison
from dmlkit.files.escape import latex, markdown

Rows = list[list[str]]
Differences = Sequence[dict[str, Comparison]]


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


def comparison_rows(results: Sequence[Result], differences: Differences) -> Rows:
    """One row a metric and run, with a dash where a run lacks it; what a later run differs from the first by, where
    they share their queries."""
    rows = [["metric", "run", "value", "95 % interval", "difference", "95 % interval of it", "p"]]
    for name in dict.fromkeys(name for result in results for name in result.report.metrics):
        for result, changes in zip(results, [{}, *differences], strict=True):
            if name not in result.report.metrics:
                rows.append([name, result.name, "-", "", "", "", ""])
                continue
            interval = result.report.intervals.get(name)
            row = [name, result.name, f"{result.report.metrics[name]:.4f}"]
            row.append(f"{interval[0]:.4f} .. {interval[1]:.4f}" if interval else "")
            change: Comparison | None = changes.get(name)
            if change is None:
                rows.append([*row, "", "", ""])
            else:
                between = f"{change.low:+.4f} .. {change.high:+.4f}"
                rows.append([*row, f"{change.difference:+.4f}", between, f"{change.p_value:.4f}"])
    return rows
