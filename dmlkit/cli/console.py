"""Printing in a terminal. Text from outside is escaped, so that the terminal and rich do not interpret it."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from dmlkit.errors import counted, merged
from dmlkit.files.escape import near_path, printable, printable_json

if TYPE_CHECKING:
    from dmlkit.distributed.launch import Ranks
    from dmlkit.files.image_file import Box
    from dmlkit.vectors.progress_bar import Bar

TableRows = Sequence[Sequence[str | list[str]]]
"""The header row, then the other rows; a cell may have several lines."""
UNBOUNDED = 10_000  # characters; wider than any cell
WORD = 12  # characters; the minimum width of a column of text
PADDING = 3  # characters of a column besides its text: two spaces and a border
COMMAND = re.compile(r"dmlkit \w+( '[^']*'| \S+)?( '[^']*'| \S+)?")
TEXT_COLUMNS = {
    *("run", "checkpoint", "split", "metric", "definition", "variant", "verdict", "a", "b", "known", "seeds", "label"),
    *("path", "image", "group", "best guess", "guess", "nearest", "asked by", "among", "family", "members"),
}


class Output:
    """Output of the command that runs: text goes to standard error if --json is given, which prints only JSON.

    Each command gets a new console, since rich looks for colors when it is made.
    """

    console = Console()


def say(text: str, *, style: str = "") -> None:
    """Print a line of text; a terminal wraps it between words, but not a command, which may be copied as one line."""
    is_one_line = not Output.console.is_terminal or "dmlkit " in text
    Output.console.print(Text(printable(text), style=style), soft_wrap=is_one_line)


def say_prose(text: str) -> None:
    """Print a sentence, also in a file as lines of the terminal's width, without breaking a name or a short command."""
    for line in wrapped(printable(text), Output.console.width):
        Output.console.print(Text(line), soft_wrap=True)


def say_metrics(start: str, metrics: Mapping[str, float]) -> None:
    """Print metrics after the start of a line, without breaking a name from its value."""
    parts = [f"{name} {value:.3f}".replace(" ", "\0") for name, value in metrics.items()]
    for line in wrapped("  ".join([f"{start} {parts[0]}", *parts[1:]]) if parts else start, Output.console.width):
        Output.console.print(Text(printable(line)), soft_wrap=True)


def wrapped(text: str, width: int) -> list[str]:
    r"""Return the lines of a sentence, without breaking a name or a short command; a zero byte is a space to keep.

    Example:
        >>> wrapped("the gallery is not calibrated; run dmlkit calibrate gal first", 40)
        ['the gallery is not calibrated; run', '  dmlkit calibrate gal first']
        >>> wrapped("last (epoch 9)  test recall@1\0000.932  map@r\0000.500", 40)
        ['last (epoch 9)  test recall@1 0.932', '  map@r 0.500']
    """
    protected = COMMAND.sub(lambda match: match[0].replace(" ", "\0"), text)
    lines = wrap(protected, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def print_table(rows: TableRows, title: str | None = None) -> None:
    """Print a table with a header row; columns of numbers are right-aligned.

    If the longest words of the columns of text do not fit side by side, each row has its texts one below the other. If
    the columns of numbers do not fit either, an interval is below its number.
    """
    texts = [name in TEXT_COLUMNS for name in rows[0]]
    if sum(texts) > 1 and _width(rows, texts) > Output.console.width:
        rows = [_stacked(row, texts) for row in rows]
        texts = [*[False] * texts.count(False), True]
    if _width(rows, texts) > Output.console.width:
        rows = [[_broken(cell) for cell in row] for row in rows]
    has_lines = any(isinstance(cell, list) for row in rows for cell in row)
    table = Table(title=None if title is None else Text(printable(title)), title_justify="left", show_lines=has_lines)
    for name, text in zip(cells(rows[0]), texts, strict=True):
        table.add_column(name, justify="left" if text else "right")
    for row in rows[1:]:
        table.add_row(*cells(row))
    show_table(table)


def print_tables(rows: TableRows, names: int) -> None:
    """Print a table whose first columns name its rows; columns that do not fit are in more tables with these names."""
    columns = [[[cell] for cell in column] for column in zip(*rows, strict=True)]
    widths = [_width(column, [name in TEXT_COLUMNS for name in column[0]]) - 1 for column in columns]
    start, named = names, sum(widths[:names]) + 1
    while start < len(widths):
        end = start + 1
        while end < len(widths) and named + sum(widths[start : end + 1]) <= Output.console.width:
            end += 1
        print_table([[*row[:names], *row[start:end]] for row in rows])
        start = end


def _width(rows: TableRows, texts: Sequence[bool]) -> int:
    """Return the width of a table that breaks no number and no word."""
    sizes = [_word_and_line(column) for column in zip(*map(cells, rows), strict=True)]
    needed = sum(word if text else line for text, (word, line) in zip(texts, sizes, strict=True))
    return needed + PADDING * len(texts) + 1


def _stacked(row: Sequence[str | list[str]], texts: Sequence[bool]) -> list[str | list[str]]:
    """Return the numbers of a row, then the lines of all its texts as one cell."""
    lines = [[cell] if isinstance(cell, str) else cell for cell, text in zip(row, texts, strict=True) if text]
    below = [f"  {line}" for cell in lines[1:] for line in cell if line]
    return [*(cell for cell, text in zip(row, texts, strict=True) if not text), [*lines[0], *below]]


def _broken(cell: str | list[str]) -> str | list[str]:
    """Return the lines of a number and its interval, ``0.41  0.29 .. 0.63``, or of their header."""
    parts = re.split(r"  (?=\S)|(?<=,) (?=95 % interval)", cell) if isinstance(cell, str) else []
    return parts if len(parts) > 1 else cell


def show_table(table: Table) -> None:
    """Print a table. Numbers are never cut; the terminal wraps lines that are too long."""
    width, numbers = Output.console.width, [column.no_wrap or column.justify == "right" for column in table.columns]
    sizes = [_word_and_line((column.header, *column.cells)) for column in table.columns]
    widest = [line for _, line in sizes]
    minimums = [line if number else word for number, (word, line) in zip(numbers, sizes, strict=True)]
    if (room := width - sum(minimums) - PADDING * len(minimums) - 1) < 0:  # break words
        minimums = [wide if number else min(wide, WORD) for wide, number in zip(widest, numbers, strict=True)]
        room = max(0, width - sum(minimums) - PADDING * len(minimums) - 1)
    narrow_first = sorted(range(len(minimums)), key=lambda index: widest[index] - minimums[index])
    for done, index in enumerate(narrow_first):
        extra = min(widest[index] - minimums[index], room // (len(minimums) - done))
        table.columns[index].width, room = minimums[index] + extra, room - extra
        table.columns[index].no_wrap, table.columns[index].overflow = numbers[index], "fold"
    Output.console.width = max(width, sum(minimums) + PADDING * len(minimums) + 1)
    Output.console.print(table)
    Output.console.width = width


def _word_and_line(column: Sequence[RenderableType]) -> tuple[int, int]:
    """Return the lengths of the longest word and of the longest line of a column."""
    console = Output.console
    sizes = [console.measure(cell, options=console.options.update(width=UNBOUNDED)) for cell in column]
    return max(size.minimum for size in sizes), max(size.maximum for size in sizes)


def bars() -> "Bar":
    """Return a function that shows a progress bar for each step of a command."""
    from dmlkit.vectors.progress_bar import image_progress

    return partial(image_progress, Output.console)


def ranks_of(device: str, *precision: str) -> "Ranks":
    """Return the ranks of a command, of which only the first one prints; see `start_ranks`."""
    from dmlkit.distributed.launch import start_ranks

    ranks = start_ranks(device, *precision)
    Output.console.quiet = not ranks.is_global_zero
    return ranks


def image_cell(path: str, box: "Box | None") -> str | list[str]:
    """Return the cell of an image: its path, and below it the box that is meant."""
    return near_path(path) if box is None else [near_path(path), box.sides]


def say_skipped(messages: Sequence[str], why: str = "could not be read:") -> None:
    """Print the number of images that a command left out, and a line per kind of message."""
    if not messages:
        return
    say(f"{counted(len(messages), 'image')} {why}")
    for line in merged(messages):
        say(f"  {line}")


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
        measured += ": the run alone is better" if fusion["together"] < fusion["alone"] else ""
    weights = "mean of logits" if fusion["weights"] == "mean" else "logistic weights"
    similarity = "matches of patches" if fusion["run"] == "local" else f"the similarity of {fusion['run']}"
    return f"with {fusion['share']:.2f} of {similarity} ({weights}{measured})"


def say_json(data: Any) -> None:
    """Print JSON for programs, as UTF-8 if the stream supports it."""
    typer.echo(printable_json(json.dumps(data, indent=2, ensure_ascii=False)))


def cells(row: Sequence[str | list[str]]) -> list[Text]:
    """Return the cells of a table row, with control characters escaped and no markup."""
    lines = ([cell] if isinstance(cell, str) else cell for cell in row)
    return [Text("\n").join(Text(printable(line)) for line in cell) for cell in lines]
