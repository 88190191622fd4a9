"""Images to embed, with their labels: files, folders, tables, vectors, or a split of a recipe's dataset."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dmlkit.datasets.base import Split
from dmlkit.datasets.files.boxes import Boxes, check_boxes, read_boxes
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import read_image
from dmlkit.datasets.files.listing import Listing
from dmlkit.datasets.files.paths import raise_faults, readable_name, unreadable_name
from dmlkit.datasets.files.samples import samples_named
from dmlkit.datasets.files.table_file import LABEL, column_names, read_images_table
from dmlkit.datasets.folder import is_split
from dmlkit.datasets.table import TableRows
from dmlkit.errors import UserError, warn, warn_once
from dmlkit.files.csv_table import column_called
from dmlkit.files.image_file import Box, some_image_files
from dmlkit.files.labels import label_notes, label_of, path_label
from dmlkit.files.regular import TABLES
from dmlkit.recipe.schema import Recipe

FOLDER, NONE = "folder", "none"
"""Values of ``--labels`` that are not a column of a table."""


class ImageList(Dataset):
    """Image files, each with or without a label.

    Args:
        labels: label of each file, or None. Default: none has a label.
        boxes: box of each file. Default: the full images.
    """

    def __init__(
        self,
        paths: list[str],
        labels: Sequence[str | None] | None = None,
        boxes: Sequence[Box] | None = None,
    ) -> None:
        names = sorted({label for label in labels or () if label is not None})
        code: dict[str | None, int] = {None: -1} | {name: number for number, name in enumerate(names)}
        codes = torch.tensor([code[label] for label in labels or [None] * len(paths)], dtype=torch.int64)
        super().__init__(codes, names, paths)
        self.boxes = None if boxes is None else np.array([box[:4] for box in boxes])

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
        split: split of the recipe's dataset, used without ``images``.
        labels, boxes: see `images_at`.

    Raises:
        UserError: the images are missing, cannot be read or there are none; or vectors get ``labels`` or ``boxes``.
    """
    if images is None:
        return recipe.dataset.build(split)
    if samples_named(recipe.dataset.sample).has_pixels:
        return images_at(images, labels, boxes, depth=label_depth(recipe))
    for option, given in (("--labels", labels), ("--boxes", boxes)):
        if given is not None:
            taken = f"{recipe.dataset.sample}s"
            raise UserError(f"{option}: applies to images, but the model takes {taken}; remove this option")
    return recipe.dataset.unlabeled(images)


def lacks_labels(source: Path) -> bool:
    """Return whether images are those of a table without a column of labels, as queries may be.

    A column with a similar name is reported.

    Raises:
        UserError: the table cannot be read.
    """
    columns = column_names(source) if _is_table(source) else [LABEL]
    with suppress(UserError):  # several columns may be the label
        if column_called(columns, LABEL, str(source)) is not None:
            return False
    lower = {name.lower(): name for name in columns}
    if near := get_close_matches(LABEL, lower, n=1, cutoff=0.7):
        warn(f"{source}: no column {LABEL!r}, so no image has a known label; did you mean {lower[near[0]]!r}?")
    return True


def _is_table(source: Path) -> bool:
    return source.suffix.lower() in TABLES and not source.is_dir()


def label_depth(recipe: Recipe) -> int:
    """Return how many folders name a class of a recipe: one, or one for each of its levels."""
    return max(1, len(recipe.dataset.levels))


def images_at(source: Path, labels: str | None = None, boxes: Boxes | None = None, *, depth: int = 1) -> Dataset:
    """Return the images of a file, a folder or a table, with their labels: the one rule for all commands.

    Args:
        source: image; folder of image files; or table with a column ``path``, and the box ``x1 y1 x2 y2`` or
            ``x y width height`` if it has one.
        labels: ``folder``, the default except for tables: an image in a subfolder has its name, or in ``train/`` and
            ``test/`` folders the name of the folder below them, and an image at the top has no label.
            ``none``: no image has a label. Otherwise a column of a table. Default: ``label``.
        boxes: boxes of an image or of a folder of image files, see `read_boxes`; each is a sample, and a category of
            COCO is its label. For a table only their margin.
        depth: number of folders that a label names, e.g. 2 for ``genus/species``, see `label_depth`.

    Raises:
        UserError: there are no images, a name is not UTF-8, the table lacks the column, or see `read_boxes` and
            `check_boxes`.
    """
    if labels not in (None, FOLDER, NONE) and not _is_table(source):
        raise UserError(f"--labels {labels}: {source} is not a table, so it has no columns; use {FOLDER} or {NONE}")
    if boxes is not None:
        return _boxed(source, labels, boxes, depth)
    if _is_table(source):
        column = None if labels == NONE else labels or LABEL
        rows = TableRows(read_images_table(source, column), source, source.parent, are_boxes_measured=True)
        dataset = _listed(rows.listing(), has_labels=column is not None)
        check_boxes(dataset, source, rows.where)
        return dataset
    if source.is_file():
        return ImageList([str(source)])
    if not source.is_dir():
        raise UserError(f"{source}: no such file or folder; expected an image, a folder of images, or a table")
    return _files_below(source, 0 if labels == NONE else depth)


def _boxed(source: Path, labels: str | None, boxes: Boxes, depth: int) -> Dataset:
    """Return the boxes of images as samples."""
    boxes.check()
    if boxes.source is None:
        dataset = images_at(source, labels, depth=depth)
        if dataset.boxes is None:
            raise UserError(
                f"--box-margin, --box-confidence: {source} has no boxes; name them with --boxes, or give a table with "
                "the columns x1, y1, x2, y2"
            )
    elif _is_table(source):
        raise UserError(f"--boxes {boxes.source}: {source} is a table; give its folder of images, or put boxes into it")
    else:
        found, left_out = read_boxes(source, boxes)
        paths = [one.path for one in found]
        folders = _folder_labels(source, paths, depth) if source.is_dir() else [None] * len(found)
        named = zip(found, folders, strict=True)
        names = [folder if one.label is None else label_of(one.label) for one, folder in named]
        dataset = ImageList(paths, None if labels == NONE else names, [one.box for one in found])
        dataset.left_out = left_out
    dataset.margin = boxes.margin
    return dataset


def _listed(listing: Listing, *, has_labels: bool) -> Dataset:
    raise_faults(listing.faults)
    if has_labels:
        listing.warn_of_notes()
    dataset = listing.everything()
    if not has_labels:
        dataset.labels = torch.full_like(dataset.labels, -1)
    return dataset


def _files_below(folder: Path, depth: int) -> ImageList:
    paths = some_image_files(folder)
    raise_faults(unreadable_name(path) for path in paths if not readable_name(path))
    return ImageList(paths, _folder_labels(folder, paths, depth) if depth else None)


def _folder_labels(folder: Path, paths: list[str], depth: int) -> list[str | None]:
    """Return the label of each image by its subfolders, at most ``depth`` of them; None at the top."""
    place = len(folder.parts) + is_split(folder)  # of the class in a path
    names = ["/".join(Path(path).parts[place:-1][:depth]) for path in paths]
    labels = {name: path_label(name.split("/")) for name in names}
    for note in label_notes(Counter(names), str(folder), labels.__getitem__):
        warn_once(note)
    return [labels[name] for name in names]
