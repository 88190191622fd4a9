"""Columns of CSV tables, checked before torch is imported."""

import csv
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from dmlkit.errors import UserError

TABLE_COLUMNS = ["path", "label"]


def columns_of(file: Path) -> list[str]:
    """Return the columns of a CSV table, in its first line; none if it is no such table, or cannot be read."""
    if file.suffix.lower() != ".csv" or not file.is_file():
        return []
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            return next(csv.reader(lines), [])
    except (OSError, UnicodeDecodeError, csv.Error):  # reported by the reader of the table
        return []


def require_column(file: Path, columns: Sequence[str], name: str) -> None:
    """Check that a table has a column once.

    Raises:
        UserError: it does not; the message has the most similar column.
    """
    if columns.count(name) != 1:
        near = "".join(f"; did you mean {one!r}?" for one in get_close_matches(name, columns, n=1))
        fault = "twice" if name in columns else f"not at all{near}; its columns: {', '.join(columns)}"
        raise UserError(f"{file}: expected the column {name!r} once, got it {fault}")


def missing_columns(columns: Sequence[str]) -> Iterator[str]:
    """Yield an error for each column that a table of a dataset must have and does not have."""
    for name in TABLE_COLUMNS:
        if name not in columns:
            yield f"has no column {name!r}; it has {', '.join(columns)}; rename the one with the {name}s"
