"""The one table that every list of images is read into, with paths that lead to its images."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from dmlkit.errors import UserError, counted, some_of, warn_once
from dmlkit.files.columns import LABEL, PATTERN, SIGHTING, TEXTS, arrow_compute, known_columns, rows_where, text_column
from dmlkit.files.image_file import BadImageError, decoding, image_files, some_image_files, upright_size
from dmlkit.files.outputs import BOX, write_table
from dmlkit.files.paths import SUSPICIOUS, are_of_windows, inside, raise_faults
from dmlkit.files.readers.base import ImageTable, Reader, reader_of
from dmlkit.files.regular import EXTENSIONS

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
        example = f"{sample[0]!r} as {names[rows[0]]!r}"
        listed.notes.append(f"{listed.file}: paths are read as below {listed.root}, {example}")
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
