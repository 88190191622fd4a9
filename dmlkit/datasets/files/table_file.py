"""Reader of tables of images: columns by their usual names, boxes, and where and when images were taken.

The columns ``latitude``, ``longitude`` and ``time`` are the sighting of an image.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from math import isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dmlkit.datasets.files.paths import are_of_windows, raise_faults
from dmlkit.errors import UserError, counted, first_line, warn_once
from dmlkit.files.csv_table import column_called, key_of, own_column, read_csv
from dmlkit.files.escape import excerpt
from dmlkit.files.outputs import BOX
from dmlkit.files.regular import check_regular, what_instead
from dmlkit.files.source import MOVED

LABEL = "label"
"""Column of the labels, unless another one is named."""
TEXTS = ("path", "label", "split", "query", "gallery", "super_class", "group")
SIGHTING = ("latitude", "longitude", "time")
SIDES = (BOX, ("xmin", "ymin", "xmax", "ymax"), ("left", "top", "right", "bottom"))
"""Names of the columns of a box by its sides, as `key_of` returns them, perhaps after ``bbox``."""
SIZED = (("x", "y", "width", "height"), ("x", "y", "w", "h"), *((*side[:2], "width", "height") for side in SIDES[1:]))
"""Names of the columns of a box by its left, its top and its size."""
WHOLE = ("bbox", "box", "boundingbox")
"""Names of a column of boxes ``[left, top, width, height]``, as COCO has them."""
DECIMAL_COMMA = r"^\s*([-+]?[0-9]+),([0-9]+)\s*$"
NUMBER = r"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?"
FOUR = r"^\s*[\[(]?\s*" + r"[\s,;]+".join(f"(?P<n{place}>{NUMBER})" for place in range(4)) + r"\s*[\])]?\s*$"


def read_table(file: Path, root: Path | None = None) -> Any:
    """Read a pyarrow table of a dataset and rename its columns to dmlkit's names, see `known_columns`.

    Args:
        file: the table.
        root: folder that the paths are relative to. Default: that of the table.

    Raises:
        UserError: the file is missing, of another kind or damaged, or lacks ``path`` or ``label``.
    """
    if not is_csv(file) and file.suffix.lower() != ".parquet":
        raise UserError(f"{file}: expected a .csv, .tsv or .parquet file")
    table = known_columns(_read(file, f"no such file; {MOVED}file=PATH"), str(file))
    return with_slashes(table, str(file), root or file.parent)


def read_images_table(file: Path, label: str | None, root: Path | None = None) -> Any:
    """Read the paths, labels and boxes of a pyarrow table of images, and rename the columns to dmlkit's names.

    Args:
        file: the table.
        label: column of the labels, by its own name unless it is ``label``; None for no labels, then each is empty.
        root: folder that the paths are relative to. Default: that of the table.

    Raises:
        UserError: the file is missing or damaged, or lacks a column.
    """
    import pyarrow as pa

    table = _read(file, TABLE_EXPECTED)
    names = _names(table, str(file))
    labels = table.column(own_column(names, label, str(file))) if label else pa.array([""] * len(table))
    kept = known_columns(table, str(file), needs=("path",))
    kept = kept.select([name for name in ("path", *BOX) if name in kept.column_names])
    return with_slashes(_checked(kept.append_column(LABEL, labels), str(file)), str(file), root or file.parent)


TABLE_EXPECTED = "no such file; expected a table of images"


def column_names(file: Path) -> list[str]:
    """Return the names of the columns of a table of images.

    Raises:
        UserError: the file is missing or damaged.
    """
    return _names(_read(file, TABLE_EXPECTED), str(file))


def _names(table: Any, where: str) -> list[str]:
    try:
        return table.column_names
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: the column names are not UTF-8: {error}; save the table as UTF-8") from None


def _read(file: Path, missing: str) -> Any:
    """Read a table; the columns of a CSV file are text, so that the label 007 stays one."""
    import pyarrow as pa
    from pyarrow import parquet

    if is_csv(file):
        found = read_csv(file, missing)
        return found.table().replace_schema_metadata({FIRST_LINE: str(found.first)})
    try:
        check_regular(file)
        return parquet.read_table(file)
    except FileNotFoundError:
        raise UserError(f"{file}: {missing}") from None
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot read this table: {what_instead(file, first_line(error))}") from error


FIRST_LINE = b"first line"  # of a CSV file's rows, in the metadata of the table


def row_place(table: Any, file: Path, row: int) -> str:
    """Return the place of a row in the file of a table, for messages."""
    first = (table.schema.metadata or {}).get(FIRST_LINE)
    return f"{file}: row {row + 1}" if first is None else f"{file}:{row + int(first)}"


def known_columns(table: Any, where: str, needs: Sequence[str] = ("path", "label")) -> Any:
    """Return the columns of a pyarrow table that dmlkit reads, by its names, and check them.

    A column is found by dmlkit's name, also in other case, or by a usual one, see `column_called`; boxes by the names
    of their sides, by those of their left, top and size, or in one column, as the columns `BOX`. A name that is not
    dmlkit's is reported.

    Args:
        table: the table; other columns are left out.
        where: beginning of errors.
        needs: columns that the table must have.

    Raises:
        UserError: the table lacks one of them, has a column twice or with two usual names, or lacks one of columns that
            belong together.
    """
    names = _names(table, where)
    places = {name: own_column(names, name, where) for name in needs}
    for name in (*TEXTS, *SIGHTING):
        if name not in places and (place := column_called(names, name, where)) is not None:
            places[name] = place
    taken = [f"{name} from {names[places[name]]!r}" for name in needs if names[places[name]] != name]
    columns = {name: table.column(place) for name, place in places.items()}
    boxes = _boxes(table, [name if place not in places.values() else "" for place, name in enumerate(names)], where)
    if boxes is not None:
        columns |= dict(zip(BOX, boxes.columns, strict=True))
        taken += boxes.taken
    if taken:
        warn_once(f"{where}: reads {', '.join(taken)}")
    if ("query" in columns) != ("gallery" in columns):
        given, other = ("query", "gallery") if "query" in columns else ("gallery", "query")
        raise UserError(f"{where}: has {given} without {other}; add the column {other}, or remove {given}")
    import pyarrow as pa

    return _checked(pa.table(columns, metadata=table.schema.metadata), where)


def _checked(table: Any, where: str) -> Any:
    """Return a table whose texts are UTF-8: Parquet may declare any bytes as text."""
    for name in (*TEXTS, *SIGHTING):
        if name in table.column_names:
            check_texts(table[name], name, where)
    return table


class _Boxes(NamedTuple):
    columns: list[Any]  # left, top, right and bottom
    taken: list[str]  # what they are read from, if it is not the columns `BOX`


def _boxes(table: Any, names: Sequence[str], where: str) -> _Boxes | None:
    """Return the boxes of a table, by the first of the ways in which columns may have them; None if it has none.

    Raises:
        UserError: some columns of a way are missing, or a value is no number.
    """
    keys = [key_of(name) for name in names]
    places = {key.removeprefix("bbox").removeprefix("box") or key: place for place, key in enumerate(keys) if key}
    places |= {name: place for place, name in enumerate(names) if name in BOX}
    for ways, is_sized in ((SIDES, False), (SIZED, True)):
        for way in ways:
            if all(side in places for side in way):
                found = [names[places[side]] for side in way]
                sides = [numbers(table, places[side], where) for side in way]
                taken = [] if way == BOX else [f"boxes from {', '.join(map(repr, found))}"]
                return _Boxes(_with_far_sides(sides) if is_sized else sides, taken)
    for name in WHOLE:
        if name in keys:
            place = keys.index(name)
            sides = _with_far_sides(_whole_boxes(table.column(place), f"{where}: column {names[place]!r}"))
            return _Boxes(sides, [f"boxes from {names[place]!r} as left, top, width, height"])
    for way in SIDES:
        given = [names[places[side]] for side in way if side in places]
        if len(given) > (way != BOX):  # a single "left" or "top" may be anything
            missing = [side for side in way if side not in places]
            raise UserError(
                f"{where}: has {' and '.join(given)} without {' and '.join(missing)}; expected all four sides of a "
                "box, or other names for columns that are no boxes"
            )
    return None


def _with_far_sides(numbers: Sequence[Any]) -> list[Any]:
    left, top, width, height = numbers
    add = arrow_compute().add
    return [left, top, add(left, width), add(top, height)]


def _whole_boxes(column: Any, where: str) -> list[Any]:
    """Return the four numbers of each cell: a list, or text such as ``[4, 4, 20, 20]``; null for an empty cell."""
    import pyarrow as pa

    compute, kind = arrow_compute(), column.type
    try:
        if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            is_wrong = compute.not_equal(compute.fill_null(compute.list_value_length(column), 4), 4)
            sides = () if rows_where(is_wrong).size else [compute.list_element(column, place) for place in range(4)]
        else:
            texts = column.cast(pa.string())
            texts.validate(full=True)
            found = compute.extract_regex(texts, FOUR)
            is_wrong = compute.and_(compute.is_valid(texts), compute.is_null(found))
            sides = [compute.struct_field(found, [place]) for place in range(4)]
        if wrong := rows_where(is_wrong).tolist():
            count = counted(len(wrong), "cell is no box", "cells are no boxes")
            shown = f"{count}, e.g. {excerpt(repr(column[wrong[0]].as_py()))}"
            raise UserError(f"{where}: {shown}; expected left, top, width and height, e.g. [4, 4, 20, 20]")
        return [side.cast(pa.float64()) for side in sides]
    except pa.ArrowException as error:
        raise UserError(f"{where}: expected boxes, e.g. [4, 4, 20, 20], got {kind}: {first_line(error)}") from error


def numbers(table: Any, place: int, where: str) -> Any:
    """Return a column as float64, null for an empty cell; a text may have a decimal comma.

    Raises:
        UserError: a value is no number.
    """
    import pyarrow as pa

    column, name = table.column(place), table.column_names[place]
    if pa.types.is_string(column.type):
        compute = arrow_compute()
        column = compute.replace_substring_regex(compute.utf8_trim_whitespace(column), DECIMAL_COMMA, r"\1.\2")
    try:
        return column.cast(pa.float64())
    except pa.ArrowException as error:
        raise UserError(f"{where}: column {name!r} has a value that is not a number: {first_line(error)}") from error


def with_slashes(table: Any, where: str, root: Path) -> Any:
    """Return a table whose paths have slashes, see `are_of_windows`."""
    compute, paths = arrow_compute(), text_column(table, where, "path")
    rows = rows_where(compute.fill_null(compute.match_substring(paths, "\\"), False))
    if not rows.size or not are_of_windows([paths[int(rows[0])].as_py()], root):
        return table
    slashed = compute.replace_substring(paths, "\\", "/")
    return table.set_column(table.column_names.index("path"), "path", slashed)


def check_texts(column: Any, name: str, where: str) -> None:
    """Raise a `UserError` if a text of a column is not UTF-8: Parquet may declare any bytes as text."""
    import pyarrow as pa

    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        raise UserError(f"{where}: column {name!r}: {error}; save the texts as UTF-8") from error


def is_csv(file: Path) -> bool:
    """Return whether a table is a CSV file."""
    return file.suffix.lower() in (".csv", ".tsv")


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
    names = column_names(file)
    return all(column_called(names, column, str(file)) is not None for column in LIMITS)


def read_sightings(file: Path) -> list[SightingCells]:
    """Read the cells of all rows of a table, checked; without a column ``time`` all times are empty.

    Raises:
        UserError: the table cannot be read or lacks a column, or see `SightingCells.check`.
    """
    table = known_columns(_read(file, TABLE_EXPECTED), str(file), needs=("path", *LIMITS))
    names: list[str | None] = text_column(table, str(file), "path").to_pylist()
    cells = [
        text_column(table, str(file), column).to_pylist() if column in table.column_names else [None] * len(names)
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
        value = float(cell.strip().replace(",", "."))
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
