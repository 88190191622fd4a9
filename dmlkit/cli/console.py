"""Printing in a terminal."""

from rich.console import Console
from rich.table import Table

from dmlkit.evaluation.tables import Rows

TEXT_COLUMNS = (
    *("run", "of", "metric", "definition", "class", "taken for"),
    *("variant", "statement", "figure", "verdict"),
)


def print_table(rows: Rows, console: Console, title: str | None = None) -> None:
    """A table with a header row; columns of figures are aligned to the right."""
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right")
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)
