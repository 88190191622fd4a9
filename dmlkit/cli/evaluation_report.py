"""Output of an evaluation: a table in the terminal or JSON, and a table of classes in a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from dmlkit.evaluation.report import Report


@dataclass(frozen=True)
class Shown:
    """The form of the output of an evaluation."""

    as_json: bool
    per_class: Path | None

    @property
    def console(self) -> "Console":
        """Console for text; with --json it is standard error, and only JSON goes to standard output."""
        from rich.console import Console

        return Console(stderr=self.as_json)

    def tell(self, report: "Report", evaluation: Any, *, title: str) -> None:
        """Print a report, and write the table of classes if requested."""
        from dmlkit.cli.console import print_table, say, say_json
        from dmlkit.evaluation.tables import metric_rows

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
        for note in report.notes:
            say(console, f"note: {note}")
        if report.skipped:
            say(console, f"{len(report.skipped)} images could not be read and were skipped")
