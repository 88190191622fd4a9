"""Columns of a table of images: which are the path, the label and the box, by usual names too, and their cells.

The columns ``latitude``, ``longitude`` and ``time`` are the sighting of an image.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dmlkit.errors import UserError, counted, first_line, some_of, warn_once
from dmlkit.files.csv_table import MOST_COLUMNS, column_called, key_of, number_of, own_column
from dmlkit.files.escape import command_word, quoted
from dmlkit.files.outputs import BOX
from dmlkit.files.paths import raise_faults
from dmlkit.files.readers.base import ImageTable
from dmlkit.files.regular import EXTENSIONS

LABEL = "label"
"""Column of the labels, unless another one is named."""
TEXTS = ("path", "label", "split", "query", "gallery", "super_class", "group")
SIGHTING = ("latitude", "longitude", "time")
SIDES = (BOX, ("xmin", "ymin", "xmax", "ymax"), ("left", "top", "right", "bottom"))
"""Names of the columns of a box by its sides, as `key_of` returns them, perhaps after ``bbox``."""
SIZED = (("x", "y", "w", "h"), ("x", "y", "width", "height"), *((*side[:2], "width", "height") for side in SIDES[1:]))
"""Names of the columns of a box by its left, its top and its size."""
OWN = (*TEXTS, *SIGHTING, *BOX, "bbox")
"""Names of columns that a user may give to others."""
UNKNOWN, PATTERN = "unknown", "(?P<"
"""Key of the texts that are no label, and the beginning of a part of a path with a name."""
CENTERED = (("cx", "cy", "w", "h"), *(("xcenter", "ycenter", *size) for size in (("width", "height"), ("w", "h"))))
"""Names of the columns of a box by its center and its size."""
WHOLE = ("bbox", "box", "boundingbox")
"""Names of a column of boxes ``[left, top, width, height]``, as COCO has them."""
DECIMAL_COMMA = r"^\s*([-+]?[0-9]+),([0-9]+)\s*$"
NUMBER = r"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?"
FOUR = r"^\s*[\[(]?\s*" + r"[\s,;]+".join(f"(?P<n{index}>{NUMBER})" for index in range(4)) + r"\s*[\])]?\s*$"


def known_columns(
    table: Any,
    where: str,
    needs: Sequence[str] = ("path", "label"),
    named: Mapping[str, str] | None = None,
    *,
    prints_columns: bool = True,
) -> Any:
    """Return a pyarrow table whose columns have dmlkit's names where it reads them, and check them.

    A column is found by dmlkit's name, also in other case, or by a usual one, see `column_called`; boxes by the names
    of their sides, by those of their left, top and size, or in one column, as the columns `BOX`. Other columns keep
    their names. One line says which columns are read by another name than dmlkit's, and names the others.
    """
    import pyarrow as pa

    try:
        names, named = list[str](table.column_names), dict(named or {})
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: the column names are not UTF-8: {error}; save the table as UTF-8") from None
    for name, column in zip(names, table.columns, strict=True):
        check_texts(column, name, where)
    if wrong := [name for name in named if name not in (*OWN, UNKNOWN)]:
        raise UserError(f"--column {wrong[0]}: expected one of {', '.join((*OWN, UNKNOWN))}")
    parts = _path_parts(table, where, named)
    meant = _meant(table, names, where, [name for name in needs if name not in parts], named | dict.fromkeys(parts, ""))
    indices = {index for column in meant.values() for index in column.places}
    boxes = _boxes(table, ["" if index in indices else name for index, name in enumerate(names)], where, named)
    columns = {name: column.values for name, column in meant.items()} | parts
    if UNKNOWN in named and LABEL in columns:
        labels = text_column(pa.table({LABEL: columns[LABEL]}), where, LABEL)
        columns[LABEL] = _without(labels, named[UNKNOWN].split("|"))
    taken = [
        f"{name} from {' and '.join(repr(names[index]) for index in column.places)}"
        for name, column in meant.items()
        if [names[index] for index in column.places] != [name]
    ]
    if boxes is not None:
        (box_indices, sides), source = boxes
        columns |= dict(zip(BOX, sides, strict=True))
        taken += [source] if source else []
        indices |= {*box_indices}
    others = [index for index, name in enumerate(names) if index not in indices and name and name not in OWN]
    if prints_columns:
        _say(table, where, taken, [names[index] for index in others])
    if ("query" in columns) != ("gallery" in columns):
        present, absent = ("query", "gallery") if "query" in columns else ("gallery", "query")
        raise UserError(f"{where}: has {present} without {absent}; add the column {absent}, or remove {present}")
    for index in others:
        columns.setdefault(names[index], table.column(index))
    return pa.table(columns)


def _path_parts(table: Any, where: str, named: dict[str, str]) -> dict[str, Any]:
    """Return the columns that are parts of the path by the pattern of the label; none without a pattern."""
    import pyarrow as pa

    if PATTERN not in (pattern := named.get(LABEL, "")):
        return {}
    known, option = known_columns(table, where, ("path",), prints_columns=False), "--column label"
    paths, compute = text_column(known, where, "path"), arrow_compute()
    try:
        parts = compute.extract_regex(paths, pattern)
    except pa.ArrowInvalid as error:
        raise UserError(f"{option}: {pattern!r} is no pattern: {first_line(error)}") from None
    keys = [field.name for field in parts.type]
    if wrong := [key for key in keys if key not in (*TEXTS[1:], *SIGHTING)]:
        raise UserError(f"{option}: got the part {wrong[0]!r}; expected {', '.join((*TEXTS[1:], *SIGHTING))}")
    without = rows_where(compute.is_null(parts))
    if without.size:
        example = paths[int(without[0])].as_py()
        unmatched = f"{counted(without.size, 'path')} without the parts of {pattern!r}, e.g. {example!r}"
        if without.size == len(paths):
            raise UserError(f"{option}: {where} has {unmatched}; expected a pattern that is in the paths")
        warn_once(f"{where}: {unmatched}; they have no label")
    return {key: _without(compute.struct_field(parts, [index]), [""]) for index, key in enumerate(keys)}


def _without(column: Any, texts: Sequence[str]) -> Any:
    """Return a column of text with null for some texts."""
    import pyarrow as pa

    compute = arrow_compute()
    is_kept = compute.invert(compute.is_in(compute.utf8_trim_whitespace(column), pa.array(texts, pa.string())))
    return compute.if_else(is_kept, column, pa.scalar(None, pa.string()))


def _say(table: Any, where: str, taken: Sequence[str], others: Sequence[str]) -> None:
    """Print which columns are read, and the others once, of which one that looks like boxes is named."""
    firsts = {name: str(table[name][0]) for name in others if len(table) and others.count(name) == 1}
    boxes = next((name for name, cell in firsts.items() if cell[:1] in ("[", "(") and re.match(FOUR, cell)), None)
    several = next((name for name, cell in firsts.items() if re.search(r"['\"]bbox['\"]: ", cell)), None)
    parts = [f"reads {', '.join(taken)}"] if taken else []
    names = list(dict.fromkeys(others))
    parts += [f"other columns: {some_of(names)}"] if names else []
    if repeated := [name for name in names if others.count(name) > 1]:
        columns = counted(len(others) - len(names), "column")
        parts.append(f"left out: {columns} with the name of an earlier one: {some_of(repeated)}")
    parts += [f"{boxes!r} looks like boxes, which --column {command_word(f'bbox={boxes}')} reads"] if boxes else []
    parts += [f"{several!r} has boxes, which are not read; write a row per box, with x1, y1, x2, y2"] if several else []
    if parts:
        warn_once(f"{where}: {'; '.join(parts)}")


class _Column(NamedTuple):
    places: list[int]  # of the columns that it is read from
    values: Any


def _meant(
    table: Any, names: Sequence[str], where: str, needs: Sequence[str], named: dict[str, str]
) -> dict[str, _Column]:
    """Return the columns of a table that dmlkit reads as text, by its names, see `known_columns`."""
    meant = dict[str, _Column]()
    if (pattern := named.get("path") or _folder_and_file(table, names)) is not None:
        meant["path"] = _joined(table, pattern, where)
    for name in (*TEXTS, *SIGHTING):
        if name in meant or named.get(name) == "":
            continue
        taken = {index for column in meant.values() for index in column.places}
        is_needed = bool(named.get(name)) or name in needs
        index = _place(table, names, name, where, named.get(name) or name, is_needed=is_needed)
        if index is not None and (is_needed or index not in taken):
            meant[name] = _Column([index], table.column(index))
    if "time" in meant:
        meant["time"] = _with_days(meant["time"], table, names, where)
    return meant


def _with_days(column: _Column, table: Any, names: Sequence[str], where: str) -> _Column:
    """Return a column of times; if they are times of day, as of Timelapse and Excel, with the days of a column date."""
    name = names[column.places[0]]
    times = text_column(table, where, name)
    first = next((time for time in times.slice(0, 1000).to_pylist() if time), "")
    if not re.fullmatch(CLOCK, first):
        return column
    days = next((other for other in names if key_of(other) == "date"), None)
    if days is None:
        warn_once(f"{where}: {name!r} has times of day without dates, so no image has a time")
        return column
    return _Column(column.places, arrow_compute().binary_join_element_wise(text_column(table, where, days), times, " "))


def _place(table: Any, names: Sequence[str], name: str, where: str, wanted: str, *, is_needed: bool) -> int | None:
    """Return the place of a column that has dmlkit's name ``name``, or the one that the user ``wanted``."""
    if is_needed:
        index = own_column(names, wanted, where, name)
    else:
        index = None
        with suppress(UserError) if name in SIGHTING else nullcontext():  # two times: neither is read
            index = column_called(names, name, where)
    if index is None or not name == wanted == LABEL or not _are_row_numbers(table, index):
        return index
    if not is_needed:
        return None
    others = some_of([column for column in names if column and column != names[index]], MOST_COLUMNS)
    raise UserError(
        f"{where}: {names[index]!r} has another number in each row, so it is not read as the label; name the right one "
        f"of {others} with --column {LABEL}=NAME, or take it with --column {command_word(f'{LABEL}={names[index]}')}"
    )


def _are_row_numbers(table: Any, index: int) -> bool:
    """Return whether a column is called id and has another number in each row, as far as the first ones show."""
    if key_of(table.column_names[index]) != "id":
        return False
    texts = [str(text) for text in table.column(index).slice(0, 1000).to_pylist()]
    return len(texts) > 1 and len({*texts}) == len(texts) and all(text.isdecimal() for text in texts)


FOLDERS = ("relativepath", "path", "folder", "directory", "dir", "subfolder")
"""Names of a column of the folders of images, as `key_of` returns them, if another one has the names of the files."""
FILES = ("file", "filename", "image", "imagefile", "imagename", "photo")
"""Names of that other column."""


def _folder_and_file(table: Any, names: Sequence[str]) -> str | None:
    """Return the pattern of a path in two columns, its folder and its file, e.g. of Timelapse; None if it is in one."""
    keys = [key_of(name) for name in names]
    wanted = FOLDERS[:1] if FOLDERS[0] in keys else FOLDERS  # in Timelapse's files Folder names the whole collection
    folders = [index for index, key in enumerate(keys) if key in wanted]
    files = [index for index, key in enumerate(keys) if key in FILES]
    if len(folders) != 1 or len(files) != 1 or not len(table):
        return None
    first = [str(table.column(index)[0].as_py() or "") for index in (folders[0], files[0])]
    is_image = [Path(text).suffix.lower() in EXTENSIONS for text in first]
    if is_image != [False, True] or "/" in first[1]:
        return None
    return f"{{{names[folders[0]]}}}/{{{names[files[0]]}}}"


def _joined(table: Any, pattern: str, where: str) -> _Column:
    """Return the paths in a column, or in several of a pattern."""
    names = list(table.column_names)
    if "{" not in pattern:
        index = own_column(names, pattern, where, "path")
        return _Column([index], table.column(index))
    compute, parts, indices = arrow_compute(), list[Any](), list[int]()
    for text, name in re.findall(r"([^{}]*)(?:\{([^{}]*)\})?", pattern):
        parts += [text] if text else []
        if name:
            indices.append(own_column(names, name, where, "path"))
            parts.append(compute.fill_null(text_column(table, where, names[indices[-1]]), ""))
    joined = compute.binary_join_element_wise(*parts, "")
    joined = compute.replace_substring_regex(compute.replace_substring(joined, "\\", "/"), "/+", "/")
    return _Column(indices, compute.replace_substring_regex(joined, "^/", ""))


def _boxes(table: Any, names: list[str], where: str, named: Mapping[str, str]) -> tuple[_Column, str] | None:
    """Return the sides of boxes, and what they are read from, empty for the columns `BOX`; None without boxes.

    They are read in the first of the ways in which columns may have them: by dmlkit's names, all after ``bbox``, or as
    they stand, since x, width and height may be of the image. An empty name of ``bbox`` or of a side leaves all out.
    """
    chosen = {name: named[name] for name in (*BOX, "bbox") if name in named}
    if not all(chosen.values()):
        return None
    keys = [key_of(name) for name in names]
    stated = {name: index for index, name in enumerate(names) if name in BOX}
    stated |= {name: own_column(names, column, where, name) for name, column in chosen.items()}
    ends = {index: key.removeprefix("bbox").removeprefix("box") for index, key in enumerate(keys)}
    after_box = {end: index for index, end in ends.items() if end and end != keys[index]} | stated
    index_of = {key: index for index, key in enumerate(keys) if key} | after_box
    for ways, with_sides in ((SIDES, list[Any]), (SIZED, _with_far_sides), (CENTERED, _with_sides_around)):
        for known in (stated, after_box, index_of):
            for way in _fitting(ways, known, table, where):
                indices = [known[side] for side in way]
                sides = with_sides([numbers(table, index, where) for index in indices])
                taken = f"boxes from {', '.join(repr(names[index]) for index in indices)}"
                return _Column(indices, sides), "" if way == BOX else taken
    for name in WHOLE:
        if name in chosen or name in keys:
            index = index_of[name] if name in chosen else keys.index(name)
            sides = _with_far_sides(_whole_boxes(table.column(index), f"{where}: column {names[index]!r}"))
            return _Column([index], sides), f"boxes from {names[index]!r} as left, top, width, height"
    for way in SIDES:
        present = [names[index_of[side]] for side in way if side in index_of]
        if len(present) > (way != BOX):  # a single "left" or "top" may be anything
            missing = [side for side in way if side not in index_of]
            raise UserError(
                f"{where}: has {' and '.join(present)} without {' and '.join(missing)}; expected all four sides of a "
                f"box; name others with --column {BOX[0]}=NAME, or leave these out with --column bbox="
            )
    return None


def _fitting(ways: Sequence[Sequence[str]], known: Mapping[str, int], table: Any, where: str) -> list[Sequence[str]]:
    """Return the ways of which all columns are known; of w, h and width, height the larger ones are of the image."""
    fitting = [way for way in ways if known.keys() >= {*way}]
    if fitting[:2] == [*SIZED[:2]]:
        sizes = [arrow_compute().sum(numbers(table, known[way[2]], where)).as_py() or 0 for way in SIZED[:2]]
        fitting[:2] = fitting[:2] if sizes[0] <= sizes[1] else fitting[1::-1]
    return fitting


def _with_far_sides(numbers: Sequence[Any]) -> list[Any]:
    left, top, width, height = numbers
    add = arrow_compute().add
    return [left, top, add(left, width), add(top, height)]


def _with_sides_around(numbers: Sequence[Any]) -> list[Any]:
    (*center, width, height), compute = numbers, arrow_compute()
    half = [compute.divide(width, 2.0), compute.divide(height, 2.0)]
    return [step(side, by) for step in (compute.subtract, compute.add) for side, by in zip(center, half, strict=True)]


def _whole_boxes(column: Any, where: str) -> list[Any]:
    """Return the four numbers of each cell: a list, or text such as ``[4, 4, 20, 20]``; null for an empty cell."""
    import pyarrow as pa

    compute, kind = arrow_compute(), column.type
    try:
        if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            is_wrong = compute.not_equal(compute.fill_null(compute.list_value_length(column), 4), 4)
            sides = () if rows_where(is_wrong).size else [compute.list_element(column, index) for index in range(4)]
        else:
            texts = column.cast(pa.string())
            texts.validate(full=True)
            parts = compute.extract_regex(texts, FOUR)
            is_wrong = compute.and_(compute.is_valid(texts), compute.is_null(parts))
            sides = [compute.struct_field(parts, [index]) for index in range(4)]
        if wrong := rows_where(is_wrong).tolist():
            count = counted(len(wrong), "cell is no box", "cells are no boxes")
            shown = f"{count}, e.g. {quoted(column[wrong[0]].as_py())}"
            raise UserError(f"{where}: {shown}; expected left, top, width and height, e.g. [4, 4, 20, 20]")
        return [side.cast(pa.float64()) for side in sides]
    except pa.ArrowException as error:
        raise UserError(f"{where}: expected boxes, e.g. [4, 4, 20, 20], got {kind}: {first_line(error)}") from error


def numbers(table: Any, place: int, where: str) -> Any:
    """Return a column as float64, null for an empty cell; a text may have a decimal comma."""
    import pyarrow as pa

    column, name = table.column(place), table.column_names[place]
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        compute, column = arrow_compute(), _without(column.cast(pa.string()), [""])
        column = compute.replace_substring_regex(compute.utf8_trim_whitespace(column), DECIMAL_COMMA, r"\1.\2")
    try:
        return column.cast(pa.float64())
    except pa.ArrowException as error:
        raise UserError(f"{where}: column {name!r} has a value that is not a number: {first_line(error)}") from error


def check_texts(column: Any, name: str, where: str) -> None:
    """Raise a `UserError` if a text of a column is not UTF-8: Parquet may declare any bytes as text."""
    import pyarrow as pa

    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        raise UserError(f"{where}: column {name!r}: {error}; save the texts as UTF-8") from error


class ArrowNames:
    """Strings of an Arrow column, created on access, which takes 60 bytes each instead of 150."""

    def __init__(self, column: Any) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> str:
        return self.column[index].as_py()


def text_column(table: Any, where: str, name: str) -> Any:
    """Return a column of a pyarrow table as one array of strings, null for blank ones; errors begin with ``where``."""
    import pyarrow as pa

    column, compute = table[name], arrow_compute()
    if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:  # of Hugging Face
        raise UserError(
            f"{where}: column {name!r} holds images instead of their paths; dmlkit data convert saves them as files, "
            "for all commands; start, data check and recipes (dataset hf) read them as they are"
        )
    if pa.types.is_floating(column.type):  # pandas writes an empty cell as nan
        column = compute.if_else(compute.is_nan(column), pa.scalar(None, column.type), column)
        # and then whole numbers as floats: 20230001234.0 is 2.0230001234e+10 as text
        wide = column.cast(pa.float64())
        is_whole = compute.and_(compute.equal(compute.floor(wide), wide), compute.less(compute.abs(wide), 2.0**63))
        whole = compute.if_else(is_whole, wide, pa.scalar(None, pa.float64())).cast(pa.int64())
        column = compute.coalesce(whole.cast(pa.string()), column.cast(pa.string()))
    try:
        column = _without(column.cast(pa.string()), [""])
    except pa.ArrowException as error:
        kind, reason = table.schema.field(name).type, first_line(error)
        raise UserError(f"{where}: column {name!r} has type {kind} ({reason}); expected text or numbers") from error
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def group_numbers(table: Any, where: str) -> np.ndarray | None:
    """Return the column ``group`` as (N,) int64, equal within a group; a row without a group has a unique number."""
    if "group" not in table.column_names:
        return None
    compute = arrow_compute()
    texts = compute.utf8_normalize(compute.utf8_trim_whitespace(text_column(table, where, "group")), form="NFC")
    encoded = texts.dictionary_encode()
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


def sighting_cells(listed: ImageTable) -> list[SightingCells]:
    """Return where and when the image of each row was taken, checked; without a column all cells are empty."""
    columns = [
        text_column(listed.table, str(listed.file), name).to_pylist()
        if name in listed.table.column_names
        else [None] * len(listed)
        for name in ("path", *SightingCells._fields)
    ]
    rows = [(name, SightingCells(*cells)) for name, *cells in zip(*columns, strict=True)]
    faults = list[str]()
    for name, sighting in rows:
        where = f"{listed.file}: {name}"
        coordinates = {column: cell for column in LIMITS if (cell := getattr(sighting, column)) is not None}
        for column, cell in coordinates.items():
            limit, value = LIMITS[column], number_of(cell)
            if value is None or not -limit <= value <= limit:
                faults.append(f"{where}: {column}: got {cell[:50]!r}, expected degrees from {-limit} to {limit}")
        if len(coordinates) == 1:
            faults.append(f"{where}: got one of latitude and longitude; expected both, or two empty cells")
        try:
            time_of(sighting.time, where)
        except UserError as error:
            faults.append(str(error))
    raise_faults(faults)
    return [sighting for _, sighting in rows]


CLOCK = r"\s*\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?\s*"
COLONS = r"^(\d{4}):(\d\d):(\d\d)(?=\D|$)"  # of a date as EXIF has it


def in_days(time: datetime | None) -> float:
    """Return days since 1970; nan for None. A time without a zone is of UTC.

    Example:
        >>> in_days(time_of("1970-01-02T12:00", "birds.csv: 1.jpg")), in_days(time_of("1970:01:02 06:00:00", ""))
        (1.5, 1.25)
    """
    return nan if time is None else (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() / SECONDS


def time_of(cell: str | None, where: str) -> datetime | None:
    """Return the time in a cell; None for an empty one, a time of day, and the zeros of a camera without a clock."""
    text = re.sub(COLONS, r"\1-\2-\3", (cell or "").strip())
    if not text or text.startswith("0000-00-00") or re.fullmatch(CLOCK, text):
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise UserError(
            f"{where}: time: got {text[:50]!r}, expected a date or a time such as 2026-05-31 or 2026-05-31T14:30; "
            "--column time= leaves the column out"
        ) from None
