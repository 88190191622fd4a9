"""Printing in a terminal: text from outside is shown as it is, never obeyed."""

import re
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

TableRows = Sequence[Sequence[str]]
"""A header row and others."""
TEXT_COLUMNS = (
    *("run", "of", "metric", "definition", "class", "taken for"),
    *("variant", "statement", "figure", "verdict"),
)
# Control characters, and marks that turn the direction of writing: names of files and classes may hold them.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Text with what a terminal would obey spelled out.

    Example:
        >>> printable("\x1b]0;title\x07bird")
        '\\x1b]0;title\\x07bird'
    """
    return UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], text)


def say(console: Console, text: str, *, style: str | None = None) -> None:
    """Print a line of text; in a narrow terminal it goes on in the next line."""
    console.print(Text(printable(text), style=style or ""), soft_wrap=True)


def print_table(rows: TableRows, console: Console, title: str | None = None) -> None:
    """A table with a header row; columns of figures are aligned to the right."""
    table = Table(title=None if title is None else Text(printable(title)), title_justify="left")
    for name in rows[0]:
        table.add_column(Text(name), justify="left" if name in TEXT_COLUMNS else "right")
    for row in rows[1:]:
        table.add_row(*cells(row))
    console.print(table)


def cells(row: Sequence[str]) -> list[Text]:
    """Cells of a table, shown as they are."""
    return [Text(printable(cell)) for cell in row]
