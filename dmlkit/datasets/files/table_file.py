"""Reader of table files, with OML's names of columns, and of where and when images were taken.

The columns ``latitude``, ``longitude`` and ``time`` are the sighting of an image.
"""

from datetime import UTC, datetime
from math import isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dmlkit.datasets.files.paths import raise_faults
from dmlkit.errors import UserError, first_line
from dmlkit.files.outputs import BOX
from dmlkit.files.regular import check_regular, missing_columns, require_column, what_instead
from dmlkit.files.source import MOVED

SYNONYMS = {
    "is_query": "query",
    "is_gallery": "gallery",
    "category": "super_class",
    "sequence": "group",
    "x_1": "x1",
    "x_2": "x2",
    "y_1": "y1",
    "y_2": "y2",
}
"""dmlkit's names of the columns of OML's tables."""
SIZED_BOX = ("x", "y", "width", "height")
"""Columns of a box by its left, its top and its size, used if all four are there."""
LABEL = "label"
"""Column of the labels, unless another one is named."""
TEXTS = ("path", "label", "split", "query", "gallery", "super_class", "group")


def read_table(file: Path) -> Any:
    """Read a pyarrow table and rename its columns to dmlkit's names.

    Raises:
        UserError: the file is missing, of another kind or damaged, or lacks ``path`` or ``label``.
    """
    if file.suffix.lower() not in (".csv", ".parquet"):
        raise UserError(f"{file}: expected a .csv or .parquet file")
    return known_columns(_read(file, f"; {MOVED}file=PATH"), str(file))


def read_images_table(file: Path, label: str | None) -> Any:
    """Read the paths, labels and boxes of a pyarrow table of images, and rename the columns to dmlkit's names.

    Args:
        file: the table.
        label: column of the labels; None for no labels, then every label is empty.

    Raises:
        UserError: the file is missing or damaged, or lacks a column.
    """
    import pyarrow as pa

    needed = ["path", *([label] if label else [])]
    table = _read(file, "; expected a table of images", *needed)
    columns = _names(table, str(file))
    for name in needed:
        require_column(file, columns, name)
    labels = table[label] if label else pa.array([""] * len(table))
    kept = [place for place, name in enumerate(columns) if SYNONYMS.get(name, name) in ("path", *BOX, *SIZED_BOX)]
    return known_columns(table.select(kept).append_column(LABEL, labels), str(file))


def column_names(file: Path) -> list[str]:
    """Return the names of the columns of a table of images.

    Raises:
        UserError: the file is missing or damaged.
    """
    return _names(_read(file, "; expected a table of images"), str(file))


def _names(table: Any, where: str) -> list[str]:
    try:
        return table.column_names
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: the column names are not UTF-8: {error}; save the table as UTF-8") from None


def _read(file: Path, advice: str, *texts: str) -> Any:
    """Read a table; the columns ``texts`` of a CSV file are text too, so that the label 007 stays one."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    names = (*TEXTS, *texts)
    kinds = {name: pa.string() for name in (*names, *(old for old, new in SYNONYMS.items() if new in names))}
    convert = csv.ConvertOptions(column_types=kinds, null_values=[""], strings_can_be_null=True)
    try:
        check_regular(file)
        return csv.read_csv(file, convert_options=convert) if is_csv(file) else parquet.read_table(file)
    except FileNotFoundError:
        raise UserError(f"{file}: no such file{advice}") from None
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot read this table: {what_instead(file, first_line(error))}") from error


def known_columns(table: Any, where: str) -> Any:
    """Rename the columns of a pyarrow table to dmlkit's names and check them; errors begin with ``where``.

    Raises:
        UserError: the table lacks ``path`` or ``label``, has a column twice, or lacks one of columns that belong
            together.
    """
    table = table.rename_columns([SYNONYMS.get(name, name) for name in _names(table, where)])
    table = _with_box_sides(table, where)
    columns: list[str] = table.column_names
    faults = list(missing_columns(columns))
    faults += [f"has column {name!r} twice" for name in (*TEXTS, *BOX) if columns.count(name) > 1]
    for together in (("query", "gallery"), BOX):
        given = [name for name in together if name in columns]
        if given and len(given) < len(together):
            faults.append(f"has {' and '.join(given)} without {' and '.join(set(together) - set(given))}")
    if faults:
        raise UserError("\n".join(f"{where} {fault}" for fault in faults))
    for name in TEXTS:
        if name in columns:
            check_texts(table[name], name, where)
    return table


def _with_box_sides(table: Any, where: str) -> Any:
    """Add the columns `BOX` to a pyarrow table with the columns `SIZED_BOX`, if it does not have one of them."""
    import pyarrow as pa

    columns: list[str] = table.column_names
    if any(columns.count(name) != 1 for name in SIZED_BOX) or any(name in columns for name in BOX):
        return table
    try:
        x, y, width, height = (table[name].cast(pa.float64()) for name in SIZED_BOX)
    except pa.ArrowException as error:
        raise UserError(f"{where}: a box column has a value that is not a number: {error}") from error
    add = arrow_compute().add
    for name, values in zip(BOX, (x, y, add(x, width), add(y, height)), strict=True):
        table = table.append_column(name, values)
    return table


def check_texts(column: Any, name: str, where: str) -> None:
    """Raise a `UserError` if a text of a column is not UTF-8: Parquet may declare any bytes as text."""
    import pyarrow as pa

    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        raise UserError(f"{where}: column {name!r}: {error}; save the texts as UTF-8") from error


def is_csv(file: Path) -> bool:
    """Return whether a table is a CSV file."""
    return file.suffix.lower() == ".csv"


class ArrowNames:
    """Strings of an Arrow column, created on access, which takes 60 bytes each instead of 150."""

    def __init__(self, column: Any) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> str:
        return self.column[index].as_py()


def text_column(table: Any, where: str, name: str) -> Any:
    """Return a column of a pyarrow table as one array of strings; errors begin with ``where``.

    Raises:
        UserError: the column has neither text nor numbers.
    """
    import pyarrow as pa

    column, compute = table[name], arrow_compute()
    if pa.types.is_floating(column.type):  # pandas writes an empty cell as nan
        column = compute.if_else(compute.is_nan(column), pa.scalar(None, column.type), column)
    try:
        column = column.cast(pa.string())
    except pa.ArrowException as error:
        kind, reason = table.schema.field(name).type, first_line(error)
        raise UserError(f"{where}: column {name!r} has type {kind} ({reason}); expected text or numbers") from error
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def group_numbers(table: Any, where: str) -> np.ndarray | None:
    """Return the column ``group`` as (N,) int64, equal within a group; a row without a group has a unique number."""
    if "group" not in table.column_names:
        return None
    encoded = text_column(table, where, "group").dictionary_encode()
    numbers = encoded.indices.fill_null(-1).to_numpy()
    alone = len(encoded.dictionary) + np.arange(len(numbers))
    return np.where(numbers < 0, alone, numbers).astype(np.int64)


def arrow_compute() -> Any:
    """Return pyarrow.compute without types, because its functions are created at run time."""
    from pyarrow import compute

    return compute


def rows_where(mask: Any) -> np.ndarray:
    """Return the rows at which an Arrow mask is true."""
    return mask.to_numpy(zero_copy_only=False).nonzero()[0]


LIMITS = {"latitude": 90, "longitude": 180}
SECONDS = 86_400


class SightingCells(NamedTuple):
    """Cells of a table on one image, as text; None for an empty one."""

    latitude: str | None = None
    longitude: str | None = None
    time: str | None = None

    def check(self, where: str) -> None:
        """Raise a `UserError` that begins with ``where`` for a wrong cell, or one degree without the other."""
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
    faults = list[str]()
    for name, one in zip(names, found, strict=True):
        try:
            one.check(f"{file}: {name}")
        except UserError as error:
            faults.append(str(error))
    raise_faults(faults)
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
