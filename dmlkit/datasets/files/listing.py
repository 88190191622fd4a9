"""Listings of a dataset: paths, labels and splits, with all problems, before any image is opened."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from dmlkit.datasets.files.class_names import members_of
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import read_image
from dmlkit.errors import OptionError, UserError, counted, some_of, warn_once
from dmlkit.files.paths import DATA_CHECK, PickedPaths, inside, leaves_root, raise_faults

NO_QUERIES = "does not support separate query and gallery images, which the dataset has; use official"
ListedSplit = Literal["train", "validation", "test"]
LISTED_SPLITS: tuple[ListedSplit, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class Listing:
    """Listing of the images of a dataset."""

    sample: ClassVar[str] = "image"
    root: Path  # folder of the images
    names: Any  # N paths relative to the root
    labels: np.ndarray  # (N,) int64 into ``class_names``; -1 for an image without a label, which is in no split
    class_names: Sequence[str]  # C names in the order of their labels
    splits: np.ndarray  # (N,) int8, positions in `LISTED_SPLITS`
    query: np.ndarray | None = None  # (N,) bool, or None; see `Dataset`
    gallery: np.ndarray | None = None  # (N,) bool, or None
    super_classes: np.ndarray | None = None  # (C,) int64 into ``super_class_names``, or None
    super_class_names: Sequence[str] = ()  # names of the super-classes
    groups: np.ndarray | None = None  # (N,) int64, or None; see `Dataset`
    boxes: np.ndarray | None = None
    """(N, 4) float64, left, top, right, bottom in pixels, NaN for the full image; or None."""
    faults: list[str] = field(default_factory=list[str])
    """Problems, one line each; images with a problem are not listed."""
    notes: list[str] = field(default_factory=list[str])  # remarks on what is unusual but not wrong
    source: Path | None = None  # file that errors refer to, a table; None for the root
    separator: str | None = None  # see `Dataset`

    def __post_init__(self) -> None:
        self.splits[self.labels < 0] = -1

    def warn_of_notes(self) -> None:
        """Warn of what is unusual, once per command."""
        for note in self.notes:
            warn_once(note)

    def rows_of(self, split: ListedSplit) -> np.ndarray:
        """Return the rows (n,) int64 of the images of a split."""
        return (self.splits == LISTED_SPLITS.index(split)).nonzero()[0]

    def class_sizes(self, split: ListedSplit) -> np.ndarray:
        """Return the number of images of each class of a split, (C',)."""
        return np.unique(self.labels[self.rows_of(split)], return_counts=True)[1]

    def halved(self) -> "Listing":
        """Return the listing with the first half of the classes for training and the rest for testing."""
        if self.query is not None:
            raise OptionError("dataset.split", f"halves {NO_QUERIES}")
        half = len(self.class_names) // 2
        splits = np.where(self.labels < half, LISTED_SPLITS.index("train"), LISTED_SPLITS.index("test"))
        return replace(self, splits=splits.astype(np.int8))

    def shared_classes(self) -> list[str]:
        """Return the classes that are in more than one split; of images with several labels the labels."""
        present = np.zeros((len(self.class_names), len(LISTED_SPLITS)), dtype=bool)
        labeled = self.labels >= 0
        present[self.labels[labeled], self.splits[labeled]] = True
        names = list(self.class_names)
        if self.separator is not None:
            names, members = members_of(self.class_names, self.separator)
            present = members.T @ present
        return [names[int(label)] for label in (present.sum(1) > 1).nonzero()[0]]

    def overlaps(self) -> list[str]:
        """Return an error on the classes that are in more than one split, if there are any."""
        shared = self.shared_classes()
        one, many = ("class is", "classes are") if self.separator is None else ("label is", "labels are")
        halves = "" if self.separator else "dataset.split=halves to divide the classes instead, or "
        return [
            f"{self.source or self.root}: {counted(len(shared), one, many)} in several splits ({some_of(shared)}), but "
            f"those of the test split must be unseen in training; use {halves}dataset.split=all to train on all images "
            "and then identify known classes with a gallery"
        ][: len(shared)]

    def images(self, split: ListedSplit | Literal["all"]) -> Dataset:
        """Return the images of a split, with classes numbered 0..C'-1."""
        raise_faults([*self.faults, *([] if split == "all" else self.overlaps())], DATA_CHECK)
        rows = (self.labels >= 0).nonzero()[0] if split == "all" else self.rows_of(split)
        if len(rows) == 0:
            raise UserError(
                f"{self.source or self.root}: no {self.sample}s for {split}; expected at least two classes, one for "
                "training and one for testing"
            )
        return self.pick(rows)

    def everything(self) -> Dataset:
        """Return all listed images, even if there are problems."""
        return self.pick(np.arange(len(self.labels)))

    def pick(self, rows: np.ndarray) -> Dataset:
        """Return the images of some rows (n,) int64, even if there are problems."""
        return ListedImages(self, rows)

    def labelling(self, rows: np.ndarray) -> dict[str, Any]:
        """Return the arguments of a `Dataset` of some rows, except the paths; classes are numbered 0..C'-1."""
        classes, labels = np.unique(self.labels[rows], return_inverse=True)
        if len(classes) and classes[0] < 0:
            classes, labels = classes[1:], labels - 1
        # training rows are neither query nor gallery; in training each image is compared with all others
        searches = self.query is not None and bool(self.query[rows].any())
        coarser = picked(self.super_classes, classes)
        return {
            "labels": torch.from_numpy(labels.astype(np.int64)),
            "class_names": [self.class_names[int(label)] for label in classes],
            "query": picked(self.query, rows) if searches else None,
            "gallery": picked(self.gallery, rows) if searches else None,
            "levels": None if coarser is None else {"super_class": coarser, "class": torch.arange(len(classes))},
            "groups": picked(self.groups, rows),
            "separator": self.separator,
        }


class ListedImages(Dataset):
    """Dataset of image files of a listing."""

    def __init__(self, listing: Listing, rows: np.ndarray) -> None:
        super().__init__(
            **listing.labelling(rows), paths=PickedPaths(listing.names, rows, prefix=f"{listing.root}{os.sep}")
        )
        self.boxes = None if listing.boxes is None else listing.boxes[rows]

    def file(self, index: int) -> str | None:
        return self.paths[index] if self.box(index) is None else None

    def sample(self, index: int) -> Tensor:
        return read_image(self.paths[index], self.box(index), self.max_pixels)


def picked(values: np.ndarray | None, rows: np.ndarray) -> Tensor | None:
    """Return some rows as a tensor; None if there are no values."""
    return None if values is None else torch.from_numpy(values[rows])


class ListedRows:
    """Collector of images, for datasets whose lists are read line by line."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: list[str] = []
        self.labels: list[int] = []
        self.splits: list[int] = []
        self.faults: list[str] = []

    def add(self, where: str, name: str, label: int, split: ListedSplit) -> bool:
        """Add an image; if its name leads out of the root, report that at the place ``where`` and return False."""
        safe = inside(self.root, name)
        if safe is None:
            self.faults.append(leaves_root(where, name, self.root))
            return False
        self.names.append(safe)
        self.labels.append(label)
        self.splits.append(LISTED_SPLITS.index(split))
        return True

    def listing(self, class_names: Sequence[str], **more: Any) -> Listing:
        """Return the listing of the added images; ``more`` are other fields of `Listing`."""
        return Listing(
            self.root,
            self.names,
            np.array(self.labels, dtype=np.int64),
            class_names,
            np.array(self.splits, dtype=np.int8),
            faults=self.faults,
            **more,
        )
