"""Where and when images were taken: the columns ``latitude``, ``longitude`` and ``time`` of a table."""

from datetime import UTC, datetime
from math import isnan, nan
from pathlib import Path
from typing import NamedTuple

from dmlkit.datasets.files.table_file import column_names, read_images_table, text_column
from dmlkit.errors import UserError
from dmlkit.files.columns import require_column

LIMITS = {"latitude": 90, "longitude": 180}
SECONDS = 86_400


class SightingCells(NamedTuple):
    """Cells of a table on one image, as text; None for an empty one."""

    latitude: str | None = None
    longitude: str | None = None
    time: str | None = None

    def check(self, where: str) -> None:
        """Raise an error for a cell that is out of range or cannot be read; it begins with ``where``.

        Raises:
            UserError: one of these, or one of latitude and longitude without the other.
        """
        latitude, longitude = (degrees_of(getattr(self, column), column, where) for column in LIMITS)
        if isnan(latitude) != isnan(longitude):
            raise UserError(f"{where}: got one of latitude and longitude; expected both, or two empty cells")
        days_of(self.time, where)


UNKNOWN_SIGHTING = SightingCells()


def has_sightings(file: Path) -> bool:
    """Return whether a table has the columns of places.

    Raises:
        UserError: the table cannot be read.
    """
    return {*LIMITS} <= {*column_names(file)}


def read_sightings(file: Path) -> list[SightingCells]:
    """Read the cells of all rows of a table, checked; without a column ``time`` all times are empty.

    Raises:
        UserError: the table cannot be read or lacks a column, or see `SightingCells.check`.
    """
    columns = column_names(file)
    for column in LIMITS:
        require_column(file, columns, column)
    names: list[str | None] = text_column(read_images_table(file, None), str(file), "path").to_pylist()
    cells = [
        text_column(read_images_table(file, column), str(file), "label").to_pylist()
        if column in columns
        else [None] * len(names)
        for column in SightingCells._fields
    ]
    found = [SightingCells(*row) for row in zip(*cells, strict=True)]
    for name, one in zip(names, found, strict=True):
        one.check(f"{file}: {name}")
    return found


def degrees_of(cell: str | None, column: str, where: str) -> float:
    """Return degrees; nan for an empty cell.

    Raises:
        UserError: the cell is not a number, or out of range; the error begins with ``where``.

    Example:
        >>> degrees_of("-12.5", "latitude", "birds.csv: 1.jpg")
        -12.5
    """
    if cell is None:
        return nan
    limit = LIMITS[column]
    try:
        value = float(cell)
    except ValueError:
        value = nan
    if not -limit <= value <= limit:
        raise UserError(f"{where}: {column}: got {cell[:50]!r}, expected degrees from {-limit} to {limit}")
    return value


def days_of(cell: str | None, where: str) -> float:
    """Return days since 1970; nan for an empty cell. A time without a zone is of UTC.

    Raises:
        UserError: the cell is not a time; the error begins with ``where``.

    Example:
        >>> days_of("1970-01-02T12:00", "birds.csv: 1.jpg")
        1.5
    """
    if cell is None:
        return nan
    try:
        time = datetime.fromisoformat(cell.strip())
    except ValueError:
        raise UserError(
            f"{where}: time: got {cell[:50]!r}, expected a date or a time such as 2026-05-31 or 2026-05-31T14:30"
        ) from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() / SECONDS
