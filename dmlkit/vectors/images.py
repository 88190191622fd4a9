"""Images to embed, with their labels: files, folders, tables, vectors, or a split of a recipe's dataset."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

import torch
from torch import Tensor

from dmlkit.datasets.base import Split
from dmlkit.datasets.files.boxes import Boxes, box_faults, refuse_entries
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import read_image
from dmlkit.datasets.files.listing import LISTED_SPLITS
from dmlkit.datasets.files.samples import samples_named
from dmlkit.datasets.folder import is_split
from dmlkit.datasets.table import TableRows
from dmlkit.errors import UserError, counted, some_of, warn, warn_once
from dmlkit.files.columns import LABEL, PATTERN, text_column
from dmlkit.files.image_file import Box, some_image_files
from dmlkit.files.image_table import lists_images, read_images
from dmlkit.files.labels import label_notes, path_label
from dmlkit.files.outputs import BOX
from dmlkit.files.paths import require_readable
from dmlkit.files.readers.base import ImageTable, other_lists, reader_of
from dmlkit.files.where import Where, cells_of
from dmlkit.recipe.schema import Recipe

FOLDER, NONE, OPTIONAL = "folder", "none", ""
"""Values of ``--labels`` that are not a column of a table; the last one is for queries, whose table may lack labels."""


class ImageList(Dataset):
    """Image files, each with or without a label."""

    def __init__(
        self, paths: list[str], labels: Sequence[str | None] | None = None, boxes: Sequence[Box | None] = ()
    ) -> None:
        names = sorted({label for label in labels or () if label is not None})
        numbers: dict[str | None, int] = {name: number for number, name in enumerate(names)}
        codes = [numbers.get(label, -1) for label in labels or [None] * len(paths)]
        super().__init__(torch.tensor(codes, dtype=torch.int64), names, paths)
        self.crops = boxes

    def box(self, index: int) -> Box | None:
        return self.crops[index] if self.crops else None

    def file(self, index: int) -> str | None:
        return self.paths[index] if self.box(index) is None else None

    def sample(self, index: int) -> Tensor:
        return read_image(self.paths[index], self.box(index), self.max_pixels)


def dataset_of(
    images: Path | None, split: Split, recipe: Recipe, labels: str | None = None, boxes: Boxes | None = None
) -> Dataset:
    """Return the dataset to embed: images with their labels, vectors, or a split of the recipe's dataset.

    Args:
        images: see `images_at`; a file of vectors if the recipe's samples are vectors.
    """
    if images is None:
        return recipe.dataset.build(split)
    if samples_named(recipe.dataset.sample).has_pixels:
        return images_at(images, labels, boxes, depth=label_depth(recipe))
    if option := "--labels" if labels is not None else "" if boxes is None else boxes.option:
        kind = recipe.dataset.sample
        raise UserError(f"{option}: applies to images, but the model takes {kind}s; remove this option")
    return recipe.dataset.unlabeled(images)


def label_depth(recipe: Recipe) -> int:
    """Return how many folders name a class of a recipe: one, or one for each of its levels."""
    return max(1, len(recipe.dataset.levels))


def images_at(source: Path, labels: str | None = None, boxes: Boxes | None = None, *, depth: int = 1) -> Dataset:
    """Return the images of a file, a folder or a table, with their labels: the one rule for all commands.

    Args:
        source: image; folder of image files; or what `read_images` reads.
        labels: ``folder``, the default except for tables: an image in a subfolder has its name, or in ``train/`` and
            ``test/`` folders the name of the folder below them, and an image at the top has no label.
            ``none``: no image has a label. Otherwise a column of a table. Default: ``label``. An empty text: ``label``
            if the table has it.
        boxes: how tables are read; and boxes of an image or of a folder of image files, each of which is a sample, and
            whose label, such as a category of COCO, is its label.
        depth: number of folders that a label names, e.g. 2 for ``genus/species``, see `label_depth`.
    """
    options = boxes or Boxes()
    if labels not in (None, FOLDER, NONE, OPTIONAL) and not lists_images(source, options.columns):
        raise UserError(f"--labels {labels}: {source} is not a table, so it has no columns; use {FOLDER} or {NONE}")
    if listed := listed_images(source, labels, options, depth=depth):
        return listed[1]
    if options.option:
        raise UserError(
            f"{source}: has no boxes and no columns; name a file of boxes with --boxes, or give a table instead of it"
        )
    if source.is_file():
        return ImageList([str(source)])
    if not source.is_dir():
        raise UserError(f"{source}: no such file or folder; expected an image, a folder of images, or a table")
    paths = some_image_files(source)
    if hint := other_lists(source):
        warn_once(hint)
    require_readable(paths)
    return ImageList(paths, None if labels == NONE else _folder_labels(source, paths, depth))


def listed_images(source: Path, labels: str | None, options: Boxes, *, depth: int) -> tuple[ImageTable, Dataset] | None:
    """Return the rows of a table, or of a file of boxes, and their images, see `images_at`; None for others."""
    rows = _rows_of(source, labels, options, depth)
    if rows is None:
        return None
    if labels == OPTIONAL and options.source is None and LABEL not in rows.table.column_names:
        lower = {name.lower(): name for name in rows.table.column_names}
        for similar in get_close_matches(LABEL, lower, n=1, cutoff=0.7):
            warn(f"{source}: no column {LABEL!r}, so no image has a known label; did you mean {lower[similar]!r}?")
    numbers: Sequence[int] = range(len(rows))
    if options.where is not None:
        numbers = fulfilling(rows, options.where)
        rows = rows.kept(numbers)
    if not len(rows) and not rows.faults:
        problem = "lists no images" if options.source is None else f"no boxes of {source}"
        raise UserError(f"{rows.file}: {problem}; expected at least one")
    dataset, valid_rows, faults = _checked(rows)
    if not options.skips or not valid_rows:
        way = "remove them" if options.skips else "skip them with --skip-bad-images"
        refuse_entries(str(rows.file), faults, way)
    if len(valid_rows) < len(rows):
        rows, numbers = replace(rows.kept(valid_rows), faults=[]), [numbers[row] for row in valid_rows]
        dataset, _, _ = _checked(rows)
    if options.margin and dataset.boxes is None:
        raise UserError(
            f"--box-margin {options.margin:g}: {rows.file} has no boxes; name them with --boxes, or give a table with "
            "the columns x1, y1, x2, y2"
        )
    dataset.left_out, dataset.margin, dataset.table_rows = faults, options.margin, numbers
    return rows, dataset


def _rows_of(source: Path, labels: str | None, options: Boxes, depth: int) -> ImageTable | None:
    """Return all rows of a table, or of a file of boxes, with the labels that are wanted; None for other images."""
    options.check()
    if options.source is None:
        return _of_table(source, labels, options) if lists_images(source, options.columns) else None
    if reader_of(source) is not None:
        raise UserError(
            f"--boxes {options.source}: {source} is a table; give its folder of images, or put boxes into it"
        )
    rows = read_images(options.source, None, options.columns, ("path",), options.confidence, source)
    is_in_path = labels != NONE and PATTERN in options.columns.get(LABEL, "")
    return rows if is_in_path else _with_folder_labels(rows, source, labels, depth)


def _of_table(source: Path, labels: str | None, options: Boxes) -> ImageTable:
    """Return the rows of a table with the labels that are wanted, see `images_at`."""
    columns, needs = dict(options.columns), ("path",)
    named = columns.get(LABEL, "")
    if labels == NONE:
        columns[LABEL] = named if PATTERN in named else ""  # a pattern may have other columns too
    elif labels != OPTIONAL:
        columns[LABEL], needs = labels or columns.get(LABEL, LABEL), ("path", LABEL)
    rows = read_images(source, options.root, columns, needs, options.confidence)
    if labels == NONE and LABEL in rows.table.column_names:
        rows = replace(rows, table=rows.table.drop_columns([LABEL]))
    return rows


def fulfilling(rows: ImageTable, where: Where) -> Sequence[int]:
    """Return the numbers of the rows of a table that fulfill the conditions on its columns."""
    columns = cells_of({name: rows.table[name] for name in rows.table.column_names})
    own = where.on(columns, str(rows.file))
    return range(len(rows)) if own is None else own.rows(columns, str(rows.file), len(rows))


def _checked(listed: ImageTable) -> tuple[Dataset, list[int], list[str]]:
    """Return the images of a table, the rows that are right, and what is wrong with others.

    Only paths, labels and boxes count where nothing is trained or evaluated.
    """
    columns = [name for name in ("path", LABEL, *BOX) if name in listed.table.column_names]
    rows = TableRows(replace(listed, table=listed.table.select(columns)), are_boxes_measured=True)
    listing = rows.listing()
    listing.warn_of_notes()
    dataset = listing.everything()
    kept_rows = rows.keep.nonzero()[0].tolist()
    wrong = {kept_rows[row]: fault for row, fault in box_faults(dataset).items()}
    faults = [*rows.faults, *(f"{rows.where(row)}: {fault}" for row, fault in wrong.items())]
    return dataset, [row for row in kept_rows if row not in wrong], faults


def query_table(source: Path, boxes: Boxes | None, labels: str | None = NONE) -> ImageTable | None:
    """Return the table that lists queries, see `Dataset.table_rows`; None for images that no table lists."""
    return _rows_of(source, labels, boxes or Boxes(), 1)


def _with_folder_labels(rows: ImageTable, source: Path, labels: str | None, depth: int) -> ImageTable:
    """Return the rows of boxes with the names of the folders as labels where a box has none of its own."""
    import pyarrow as pa

    table = rows.table
    paths = text_column(table, str(rows.file), "path").to_pylist()
    box_labels: list[str | None] = [None] * len(paths)
    if LABEL in table.column_names:
        box_labels = box_labels if labels == NONE else text_column(table, str(rows.file), LABEL).to_pylist()
        table = table.drop_columns([LABEL])
    if labels != NONE and source.is_dir():
        folders = _folder_labels(source, [str(source / (path or "")) for path in paths], depth)
        box_labels = [folder if label is None else label for label, folder in zip(box_labels, folders, strict=True)]
    return replace(rows, table=table.append_column(LABEL, pa.array(box_labels, pa.string())))


def folder_table(folder: Path) -> ImageTable:
    """Return the images of a folder, with the names of their folders as labels, see `images_at`, and their splits."""
    import pyarrow as pa

    images = images_at(folder)
    paths = [os.path.relpath(path, folder) for path in images.paths]
    labels = images.label_names(images.labels)
    table = ImageTable(pa.table({"path": paths, "label": pa.array(labels, pa.string())}), folder, folder)
    if not is_split(folder):
        return table
    splits = [Path(path).parts[0] for path in paths]
    table.table = table.table.append_column("split", pa.array(splits))
    others = [path for path, split in zip(paths, splits, strict=True) if split not in LISTED_SPLITS]
    if others:
        outside = counted(len(others), "image")
        table.notes.append(f"{folder}: left out: {outside} outside of train, validation and test: {some_of(others)}")
    return table.kept([row for row, split in enumerate(splits) if split in LISTED_SPLITS])


def _folder_labels(folder: Path, paths: list[str], depth: int) -> list[str | None]:
    """Return the label of each image by its subfolders, at most ``depth`` of them; None at the top."""
    start = len(folder.parts) + is_split(folder)  # of the class in a path
    parents = [os.path.dirname(path) for path in paths]  # noqa: PTH120 - Path takes 0.2 s for 100 000 images
    parts = {parent: Path(parent).parts[start:] for parent in dict.fromkeys(parents)}
    if deeper := next((levels for levels in parts.values() if len(levels) > depth), None):
        warn_once(
            f"{folder}: the label of images in deeper folders is the first name, {'/'.join(deeper[:depth])!r} of "
            f"{'/'.join(deeper)!r}; --column 'label=(?P<label>[^/]+)/[^/]*$' takes the last one"
        )
    names = ["/".join(parts[parent][:depth]) for parent in parents]
    labels = {name: path_label(name.split("/")) for name in dict.fromkeys(names)}
    for note in label_notes(Counter(names), str(folder), labels.__getitem__):
        warn_once(note)
    return [labels[name] for name in names]
