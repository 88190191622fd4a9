"""Output of an evaluation: a table in the terminal or JSON, and a table of classes in a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from dmlkit.evaluation.by_value import ByColumn
    from dmlkit.evaluation.report import Report

VALUES_SHOWN = 20


@dataclass(frozen=True)
class Shown:
    """The form of the output of an evaluation."""

    as_json: bool
    per_class: Path | None
    by: str | None = None
    table: Path | None = None

    @property
    def console(self) -> "Console":
        """Console for text; with --json it is standard error, and only JSON goes to standard output."""
        from rich.console import Console

        return Console(stderr=self.as_json)

    def tell(self, report: "Report", evaluation: Any, *, title: str, run: Path | None = None) -> None:
        """Print a report, and write the table of classes if requested.

        Args:
            report, evaluation: the result of an evaluation.
            title: title of the table.
            run: run of evaluated embeddings, whose table has the column ``by``.
        """
        from dmlkit.cli.console import print_table, say, say_json
        from dmlkit.evaluation.tables import metric_rows

        if self.by is not None:
            report = report.with_column(evaluation, self.by, self.table, run)
        if self.per_class is not None:
            evaluation.save_classes(self.per_class)
        if self.as_json:
            say_json(report.stamped())
            return
        console = self.console
        title = f"{title}: {report.queries} queries, {report.classes} classes"
        print_table(metric_rows(report, evaluation.scores.definitions), console, title)
        for score in report.worst_classes[:3]:
            name, figure = list(score.metrics.items())[-1]
            say(console, f"worst class: {score.name}, {name} {figure:.4f} over {score.queries} queries")
        for pair in report.confusions[:3]:
            share = f"{pair.queries} of its queries ({pair.share:.0%})"
            say(console, f"confused: {pair.name} taken for {pair.taken_for} in {share}")
        if report.by is not None:
            print_values(report.by, console)
        for note in report.notes:
            say(console, f"note: {note}")
        if report.skipped:
            say(console, f"{len(report.skipped)} images could not be read and were skipped")


def print_values(found: "ByColumn", console: "Console") -> None:
    """Print the last metric per value of a column, worst first, and its difference from all other queries."""
    from dmlkit.cli.console import print_table, say

    name = list(found.values[0].metrics)[-1]
    rows = [[found.column, "queries", "classes", name, "95 % interval", "to others", "95 % interval", "Holm's p"]]
    for one in found.values[:VALUES_SHOWN]:
        figures = one.metrics[name]
        ends, change = figures.interval, figures.difference_interval
        cells = [one.value, f"{one.queries:,}", f"{one.classes:,}", f"{figures.mean:.4f}"]
        cells += ["{:.3f} .. {:.3f}".format(*ends) if ends else "", f"{figures.difference:+.4f}"]
        rows.append([*cells, "{:+.3f} .. {:+.3f}".format(*change) if change else "", f"{figures.corrected:.4f}"])
    print_table(rows, console, f"per {found.column}, worst first")
    if len(found.values) > VALUES_SHOWN:
        say(console, f"{len(found.values) - VALUES_SHOWN} more values: --json")
    if found.without:
        say(console, f"note: {found.without} queries have no {found.column} and count in none of these figures")
    if any(one.metrics[name].difference_interval is None for one in found.values):
        say(console, "note: where a value or all others have fewer than 5 classes, there is no interval and p is 1")
