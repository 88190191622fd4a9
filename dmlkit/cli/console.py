"""Printing in a terminal: text from outside is shown as it is, never obeyed."""

import json
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dmlkit.files.escape import json_text, printable

TableRows = Sequence[Sequence[str]]
"""A header row and others."""
UNBOUNDED = 10_000  # characters, wider than any cell
WORD = 12  # characters: columns of text become no narrower
TEXT_COLUMNS = (
    *("run", "of", "metric", "definition", "class", "taken for"),
    *("variant", "statement", "figure", "verdict", "a", "b", "known", "seeds"),
    *("label", "path"),
)


def say(console: Console, text: str, *, style: str | None = None) -> None:
    """Print a line of text; in a narrow terminal it goes on in the next line."""
    console.print(Text(printable(text), style=style or ""), soft_wrap=True)


def print_table(rows: TableRows, console: Console, title: str | None = None) -> None:
    """A table with a header row; columns of figures are aligned to the right."""
    table = Table(title=None if title is None else Text(printable(title)), title_justify="left")
    for name in rows[0]:
        table.add_column(*cells([name]), justify="left" if name in TEXT_COLUMNS else "right")
    for row in rows[1:]:
        table.add_row(*cells(row))
    show_table(table, console)


def show_table(table: Table, console: Console) -> None:
    """Print a table; in a terminal too narrow for its figures and a word of text the terminal breaks its lines."""
    unbounded = console.options.update(width=UNBOUNDED)
    for column in table.columns:
        cells = (column.header, *column.cells)
        widest = max(console.measure(cell, options=unbounded).maximum for cell in cells)
        column.no_wrap = column.justify == "right"  # rich narrows others alone, and cuts off what is too wide then
        column.min_width = widest if column.no_wrap else min(widest, WORD)
        column.overflow = "fold"
    width = console.width
    console.width = max(width, sum((column.min_width or 0) + 3 for column in table.columns) + 1)  # 3: the frame
    console.print(table)
    console.width = width


def counted(number: int, one: str, many: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "class", "classes"), counted(2000, "class", "classes")
        ('1 class', '2000 classes')
    """
    return f"{number} {one if number == 1 else many}"


def say_json(data: Any) -> None:
    """Print JSON alone, for programs: as UTF-8 where the output takes it."""
    typer.echo(json_text(json.dumps(data, indent=2, ensure_ascii=False)))


def cells(row: Sequence[str]) -> list[Text]:
    """Cells of a table, shown as they are."""
    return [Text(printable(cell)) for cell in row]
