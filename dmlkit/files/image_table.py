"""The one table that every list of images is read into: its columns, paths and boxes, and where images were taken.

The columns ``latitude``, ``longitude`` and ``time`` are the sighting of an image.
"""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dmlkit.errors import UserError, counted, first_line, some_of, warn_once
from dmlkit.files.csv_table import column_called, key_of, number_of, own_column
from dmlkit.files.escape import command_word, quoted
from dmlkit.files.image_file import BadImageError, decoding, image_files, some_image_files, upright_size
from dmlkit.files.outputs import BOX, write_table
from dmlkit.files.paths import SUSPICIOUS, are_of_windows, inside, raise_faults
from dmlkit.files.readers.base import ImageTable, Reader, reader_of
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
LEAST_CONFIDENCE = 0.2  # of a detected box
EXPECTED = (
    "expected a table (.csv, .tsv, .xlsx, .parquet, .arrow, .jsonl, .json), or annotations of COCO, Pascal VOC, YOLO, "
    "Camtrap DP, MegaDetector or SpeciesNet, see docs/data.md"
)


def read_images(
    source: Path,
    root: Path | None = None,
    columns: Mapping[str, str] | None = None,
    needs: Sequence[str] = ("path", "label"),
    confidence: float | None = None,
    images: Path | None = None,
    *,
    prints_columns: bool = True,
) -> ImageTable:
    """Read the images that a file or folder lists: the one door for all formats.

    Args:
        source: what a `Reader` recognizes.
        root: folder that the paths are relative to. Default: that of the file.
        columns: names of the columns in the file by dmlkit's names, e.g. ``{"label": "species"}``; a path may be made
            of several, ``{"path": "{folder}/{file}"}``, and an empty name leaves a column out. The label, and others,
            may be parts of the path, ``{"label": "(?P<label>[0-9]+)_(?P<group>c[0-9])"}``, also of the images of a
            folder. ``{"unknown": "new|none"}`` are labels that mean none, besides ``unknown``.
        confidence: least confidence of a box that a detector found. Default: 0.2.
        images: an image or a folder, whose images alone are taken; others are counted.

    Returns:
        The table, with dmlkit's names for the columns that it knows, boxes in pixels, and all other columns.
    """
    listed = _read(source, columns or {}, images)
    if images is not None:
        root = images if images.is_dir() else images.parent
    if LABEL in needs and not len(listed) and listed.table.column_names == ["path"]:  # of annotations without any row
        raise_faults(listed.faults)
        raise UserError("; ".join([f"{source}: lists no images", *listed.notes]))
    listed = replace(listed, root=root or listed.root)
    listed.table = known_columns(listed.table, str(source), needs, columns, prints_columns=prints_columns)
    listed.is_share = listed.is_share or _are_shares(listed)
    listed = with_sure_boxes(listed, LEAST_CONFIDENCE if confidence is None else confidence)
    listed = with_paths(listed, images)
    if images is not None:
        listed = _given(listed, images)
    return in_pixels(listed) if listed.is_share and BOX[0] in listed.table.column_names else listed


def _are_shares(listed: ImageTable) -> bool:
    """Return whether boxes are shares of their images, because in pixels none would be larger than one."""
    if BOX[0] not in listed.table.column_names:
        return False
    boxes = np.stack([listed.table[side].to_numpy() for side in BOX])
    boxes = boxes[np.isfinite(boxes)]
    are_shares = boxes.size > 0 and boxes.min() >= 0 and 0 < boxes.max() <= 1
    if are_shares:
        warn_once(f"{listed.file}: boxes are read as shares of their images, because none is larger than 1")
    return are_shares


def lists_images(source: Path, columns: Mapping[str, str] | None = None) -> bool:
    """Return whether a path is read into a table: by a reader, or as a folder of images whose names have the labels."""
    return reader_of(source) is not None or (source.is_dir() and PATTERN in (columns or {}).get(LABEL, ""))


def _read(source: Path, columns: Mapping[str, str], images: Path | None) -> ImageTable:
    reader = reader_of(source)
    if reader is None and images is not None and source.is_dir():  # its text files may lie next to the images
        reader = next(candidate for candidate in Reader.known if candidate.title == "YOLO")
    if reader is not None:
        return reader.read(source)
    if lists_images(source, columns):
        import pyarrow as pa

        names = [os.path.relpath(path, source) for path in some_image_files(source)]
        return ImageTable(pa.table({"path": pa.array(names, pa.string())}), source, source)
    missing = "" if source.exists() else "no such file or folder; "
    raise UserError(f"{source}: {missing}{EXPECTED}")


def write_images(listed: ImageTable, output: Path) -> Path:
    """Write the rows as CSV, dmlkit's columns first; return the folder that the paths in it are relative to.

    It is that of the table if the images are below it.
    """
    columns = listed.table.column_names
    names = [name for name in (*TEXTS[:2], "group", *BOX, *SIGHTING, *TEXTS[2:-1]) if name in columns]
    names += [name for name in columns if name not in names]
    folder = Path(os.path.abspath(output.parent))  # noqa: PTH100 - links are not followed
    root = Path(os.path.abspath(listed.root))  # noqa: PTH100
    below = root.relative_to(folder).as_posix() if root.is_relative_to(folder) else "."
    cells = dict[str, Sequence[str]]()
    for name in names:
        values = listed.table[name].to_pylist()
        cells[name] = [
            "" if value is None or value != value else f"{value:.15g}" if isinstance(value, float) else str(value)
            for value in values
        ]
    if below != ".":
        cells["path"] = [path and f"{below}/{path}" for path in cells["path"]]
    write_table(output, names, zip(*cells.values(), strict=True), is_data=True)
    return folder if root.is_relative_to(folder) else listed.root


def with_sure_boxes(listed: ImageTable, least: float) -> ImageTable:
    """Return the table without the boxes that a detector is less sure of, which are counted."""
    if listed.confidences is None:
        return listed
    rows = [row for row, sure in enumerate(listed.confidences) if sure >= least]
    unsure = len(listed) - len(rows)
    if not unsure:
        return listed
    if not rows:
        raise UserError(
            f"{listed.file}: no boxes of a confidence of at least {least:g}; the surest of {unsure:,} has "
            f"{max(listed.confidences):g}: lower --box-confidence"
        )
    boxes = counted(unsure, "box", "boxes")
    listed.notes.append(f"{listed.file}: left out: {boxes} of a confidence below {least:g} (--box-confidence)")
    return listed.kept(rows)


def _given(listed: ImageTable, images: Path) -> ImageTable:
    """Return the rows of an image, or of a folder's images that are there; others are counted."""
    import pyarrow as pa

    stated = text_column(listed.table, str(listed.file), "path").to_pylist()
    # detectors write absolute paths, but labels are taken from those relative to the folder
    relative = {name: name and (inside(listed.root, name) or name) for name in {*stated}}
    names, column = [relative[name] for name in stated], listed.table.column_names.index("path")
    listed = replace(listed, table=listed.table.set_column(column, "path", pa.array(names, pa.string())))
    there = {name: name and os.path.isfile(listed.root / name) for name in set(names)}  # noqa: PTH113 - Path is slow
    if images != listed.root:
        rows = [row for row, name in enumerate(names) if name and listed.root / name == images]
        return listed.kept(rows)
    rows = [row for row, name in enumerate(names) if there[name] or (name and inside(listed.root, name) is None)]
    missing = sorted({name or "" for name in names if not there[name]} - {names[row] for row in rows})
    if missing:
        entries = counted(len(missing), "image that is not", "images that are not")
        listed.notes.append(f"{listed.file}: left out: {entries} in {listed.root}: {some_of(missing)}")
    paths = {os.path.normpath(listed.root / name) for name in names if name}
    if without := [
        os.path.relpath(path, images) for path in image_files(images) if os.path.normpath(path) not in paths
    ]:
        entries = counted(len(without), "image")
        listed.notes.append(f"{listed.file}: left out: {entries} of {images} without a box: {some_of(without)}")
    return listed.kept(rows)


def in_pixels(listed: ImageTable) -> ImageTable:
    """Return the table with boxes in pixels instead of shares; boxes of images that cannot be read are blank."""
    import pyarrow as pa

    names = text_column(listed.table, str(listed.file), "path").to_pylist()
    sizes = dict[str | None, tuple[int, int] | None]()
    boxes = np.stack([listed.table[side].to_numpy() for side in BOX], axis=1)
    for row, name in enumerate(names):
        if name not in sizes:
            sizes[name], safe = None, None if name is None else inside(listed.root, name)
            if safe is not None:
                with suppress(BadImageError), decoding(path := str(listed.root / safe)):
                    sizes[name] = upright_size(path)
        boxes[row] *= np.tile(sizes[name] or (np.nan, np.nan), 2)
    if unknown := [name for name, size in sizes.items() if name is not None and size is None]:
        shares = f"boxes are shares of their images, so those of {counted(len(unknown), 'image')} are left blank"
        listed.notes.append(f"{listed.file}: {shares}, which cannot be read: {some_of(unknown)}")
    table = listed.table
    for index, side in enumerate(BOX):
        table = table.set_column(table.column_names.index(side), side, pa.array(boxes[:, index], from_pandas=True))
    return replace(listed, table=table, is_share=False)


SAMPLE = 8  # paths that are looked for
IMAGES = ("images", "jpegimages", "image", "imgs", "img", "photos", "pictures")  # folders of images, in any case
NO_IMAGES = r"(?i)mask|thumb|label|annot|segment"  # of pictures that belong to images
MOST_FOLDERS = 50  # next to a table, in which its images are looked for


def with_paths(listed: ImageTable, images: Path | None) -> ImageTable:
    """Return the table with paths that lead to its images, if none of a sample does as it stands.

    Slashes stand for backslashes; the folders of another machine at the start of a path are dropped; the images may lie
    in a folder next to the table; and names without a suffix get that of their image. Paths may be of many others than
    ``images``, an image or a folder: then the sample is of those that end alike.
    """
    import pyarrow as pa

    compute, paths = arrow_compute(), text_column(listed.table, str(listed.file), "path")
    column = listed.table.column_names.index("path")
    backslashes = rows_where(compute.fill_null(compute.match_substring(paths, "\\"), False))
    if backslashes.size and are_of_windows([paths[int(backslashes[0])].as_py()], listed.root):
        paths = compute.replace_substring(paths, "\\", "/")
        listed = replace(listed, table=listed.table.set_column(column, "path", paths))
    distinct = paths.dictionary_encode().dictionary
    rows = _spread(range(len(distinct)))
    if not rows or _leads_to_image(listed.root, sample := [distinct[row].as_py() for row in rows]):
        return listed
    alike = [] if images is None else _rows_that_end_like(images, distinct.to_pylist())
    if alike:
        rows = _spread(alike)
        if _leads_to_image(listed.root, sample := [distinct[row].as_py() for row in rows]):
            return listed
    folders = ["", *_folders(listed.root, listed.file.stem)]
    way = next((way for name in sample if (way := _way(listed, name, folders)) is not None), None)
    if way is None:
        return listed
    dropped, folder, lacks_suffix = way
    changed = compute.replace_substring_regex(distinct, rf"^([^/]*/){{{dropped}}}", "") if dropped else distinct
    if folder:
        changed = compute.binary_join_element_wise(folder, changed, "/")
    compared = changed.take(pa.array(alike, pa.int64())) if alike else changed
    if compute.count_distinct(compared).as_py() < len(compared):  # two images would become one
        return listed
    names = changed.to_pylist()
    if lacks_suffix:
        names = _with_suffixes(listed, names)
    elif names[rows[0]] != sample[0]:
        listed.notes.append(
            f"{listed.file}: paths are read as below {listed.root}, {sample[0]!r} as {names[rows[0]]!r}"
        )
    known = dict(zip(distinct.to_pylist(), names, strict=True))
    changed = pa.array([known.get(name) for name in paths.to_pylist()], pa.string())
    return replace(listed, table=listed.table.set_column(column, "path", changed))


def _spread(rows: Sequence[int]) -> list[int]:
    """Return at most `SAMPLE` of some rows, evenly spread."""
    return sorted({rows[int(place)] for place in np.linspace(0, len(rows) - 1, SAMPLE).round()}) if rows else []


def _leads_to_image(root: Path, names: Sequence[str]) -> bool:
    """Return whether one of some paths leads to a file below a root."""
    safe = (inside(root, name) for name in names)
    return any(name is not None and os.path.isfile(root / name) for name in safe)  # noqa: PTH113


def _rows_that_end_like(images: Path, names: Sequence[str]) -> list[int]:
    """Return the rows of paths whose last part is the name of an image, or of one in a folder, or lacks its suffix."""
    files = map(Path, image_files(images) if images.is_dir() else [images])
    ends = {end for file in files for end in (file.name, file.stem)}
    return [row for row, name in enumerate(names) if re.split(r"[/\\]", name)[-1] in ends]


def _folders(root: Path, stem: str) -> list[str]:
    """Return the folders next to a table, first that of its own name, then those of images, and those of masks last."""
    try:
        names = [entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith(".")]
    except OSError:
        return []
    ranks = {name: 2 if re.match(NO_IMAGES, name) else int(name.lower() not in IMAGES) for name in names}
    return sorted(names, key=lambda name: (name != stem, ranks[name], name))[:MOST_FOLDERS]


def _way(listed: ImageTable, name: str, folders: Sequence[str]) -> tuple[int, str, bool] | None:
    """Return how a path leads to an image below the root of a table; None if it does not.

    Given are the fewest folders to drop from its start, the folder below the root, and whether it lacks the suffix.

    Raises:
        UserError: it leads to one in several folders, such as ``train`` and ``test``, none of which goes before.
    """
    parts = name.replace("\\", "/").split("/")
    for dropped in range(len(parts)):
        end = "/".join(parts[dropped:])
        if not end or re.search(SUSPICIOUS, end):
            continue
        ways = list[tuple[int, str, bool]]()
        for folder in folders:
            place = listed.root / folder / end
            if os.path.isfile(place) and place.suffix.lower() in EXTENSIONS:  # noqa: PTH113
                ways.append((dropped, folder, False))
            elif any(image.rpartition(".")[0] == place.name for image in image_names(place.parent)):
                ways.append((dropped, folder, True))
            if ways and folder.lower() in ("", listed.file.stem.lower(), *IMAGES):
                return ways[0]
        found = [folder for _, folder, _ in ways if not re.match(NO_IMAGES, folder)]
        if len(found) > 1:
            way = "name the right one with --root, in a recipe with dataset.root"
            if "split" in listed.table.column_names:
                way = "write the folders into the paths, e.g. with --column 'path={split}/{file}'"
            raise UserError(f"{listed.file}: {name!r} is in the folders {' and '.join(found)} of {listed.root}; {way}")
        if ways:
            return ways[0]
    return None


def _with_suffixes(listed: ImageTable, names: Sequence[str]) -> list[str]:
    """Return names with the suffix of their image; one without an image stays, and one of two images is a fault."""
    of_folder: dict[str, dict[str, list[str]]] = {}
    whole = list[str]()
    for name in names:
        folder, _, stem = name.rpartition("/")
        if folder not in of_folder:
            of_folder[folder] = {}
            for file in image_names(listed.root / folder):
                of_folder[folder].setdefault(file.rpartition(".")[0], []).append(file)
        images = of_folder[folder].get(stem, [])
        if len(images) > 1:
            candidates = " and ".join(sorted(images))
            listed.faults.append(f"{listed.file}: {name!r} is of {candidates}; expected one image of this name")
        whole.append(f"{folder}/{images[0]}".lstrip("/") if len(images) == 1 else name)
    return whole


def image_names(folder: Path) -> list[str]:
    """Return the names of the image files in a folder; none if it cannot be read."""
    try:
        names = [entry.name for entry in os.scandir(folder)]
        return [name for name in names if os.path.splitext(name)[1].lower() in EXTENSIONS]  # noqa: PTH122 - Path is slow
    except (OSError, ValueError):  # ValueError: a null byte in the name
        return []


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
    others = ", ".join(column for column in names if column and column != names[index])
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
    folders = [index for index, key in enumerate(keys) if key in FOLDERS]
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
            f"{where}: time: got {text[:50]!r}, expected a date or a time such as 2026-05-31 or 2026-05-31T14:30"
        ) from None
