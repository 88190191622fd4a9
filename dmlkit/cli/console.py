"""Printing in a terminal. Text from outside is escaped, so that the terminal and rich do not interpret it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dmlkit.files.escape import json_text, printable

TableRows = Sequence[Sequence[str | list[str]]]
"""The header row, then the other rows; a cell may have several lines."""
UNBOUNDED = 10_000  # characters; wider than any cell
WORD = 12  # characters; the minimum width of a column of text
TEXT_COLUMNS = (
    *("run", "checkpoint", "evaluation", "split", "metric", "definition", "class", "taken for"),
    *("variant", "statement", "verdict", "a", "b", "known", "seeds"),
    *("label", "path", "image", "group", "best guess", "nearest"),
)


def say(console: Console, text: str, *, style: str | None = None) -> None:
    """Print a line of text; the terminal wraps it if it is too long."""
    console.print(Text(printable(text), style=style or ""), soft_wrap=True)


def print_table(rows: TableRows, console: Console, title: str | None = None) -> None:
    """Print a table with a header row; columns of numbers are right-aligned."""
    has_lines = any(isinstance(cell, list) for row in rows for cell in row)
    table = Table(title=None if title is None else Text(printable(title)), title_justify="left", show_lines=has_lines)
    for name in rows[0]:
        table.add_column(*cells([name]), justify="left" if name in TEXT_COLUMNS else "right")
    for row in rows[1:]:
        table.add_row(*cells(row))
    show_table(table, console)


def show_table(table: Table, console: Console) -> None:
    """Print a table. Numbers are never cut; the terminal wraps lines that are too long."""
    unbounded = console.options.update(width=UNBOUNDED)
    for column in table.columns:
        cells = (column.header, *column.cells)
        widest = max(console.measure(cell, options=unbounded).maximum for cell in cells)
        column.no_wrap |= column.justify == "right"  # rich narrows only the others, and cuts what does not fit
        column.min_width = widest if column.no_wrap else min(widest, WORD)
        column.overflow = "fold"
    width = console.width
    console.width = max(
        width, sum((column.min_width or 0) + 3 for column in table.columns) + 1
    )  # 3: padding and border
    console.print(table)
    console.width = width


def counted(number: int, one: str, many: str) -> str:
    """Return a number with the singular or the plural of its noun.

    Example:
        >>> counted(1, "class", "classes"), counted(2000, "class", "classes")
        ('1 class', '2000 classes')
    """
    return f"{number} {one if number == 1 else many}"


def percent(probability: float) -> str:
    """Return a probability in percent, never as certain.

    Example:
        >>> percent(0.374), percent(0.9996), percent(0.001)
        ('37%', '>99%', '<1%')
    """
    return "<1%" if probability < 0.01 else ">99%" if probability > 0.99 else f"{probability:.0%}"


def fusion_line(fusion: Mapping[str, Any]) -> str:
    """Return the weights of the similarities of two runs, and why they were taken; see `Fusion`."""
    measured = ""
    if fusion["alone"] is not None and fusion["together"] is not None:
        measured = f"; validation map@r {fusion['alone']:.4f} alone, {fusion['together']:.4f} together"
    weights = "mean of logits" if fusion["weights"] == "mean" else "logistic weights"
    return f"with {fusion['share']:.2f} of the similarity of {fusion['run']} ({weights}{measured})"


def say_json(data: Any) -> None:
    """Print JSON for programs, as UTF-8 if the stream supports it."""
    typer.echo(json_text(json.dumps(data, indent=2, ensure_ascii=False)))


def cells(row: Sequence[str | list[str]]) -> list[Text]:
    """Return the cells of a table row, with control characters escaped and no markup."""
    lines = ([cell] if isinstance(cell, str) else cell for cell in row)
    return [Text("\n").join(Text(printable(line)) for line in cell) for cell in lines]
