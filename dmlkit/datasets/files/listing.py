"""What the files of a dataset say: paths, labels and splits, with all their faults, before any image is opened."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import Box, read_image
from dmlkit.datasets.files.paths import PickedPaths, inside, leaves_root, raise_faults
from dmlkit.errors import UserError

ListedSplit = Literal["train", "validation", "test"]
LISTED_SPLITS: tuple[ListedSplit, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class Listing:
    """Images of a dataset.

    Args:
        root: the folder that holds them.
        names: N paths relative to the root.
        labels: (N,) int64 into ``class_names``.
        class_names: C names, in the order that numbers them.
        splits: (N,) int8, positions in `LISTED_SPLITS`.
        query: (N,) bool, or None; see `Dataset`.
        gallery: (N,) bool, or None.
        super_classes: (C,) int64, or None.
        super_class_names: what they number.
        groups: (N,) int64, or None; see `Dataset`.
        boxes: (N, 4) float64, left, top, right, bottom in pixels, NaN for the whole image; or None.
        faults: what is wrong, one line each; images at fault are not listed.
        notes: what is worth knowing but not wrong.
        source: what says all this, for errors: a table; None: the root itself.
    """

    sample: ClassVar[str] = "image"
    root: Path
    names: Any
    labels: np.ndarray
    class_names: Sequence[str]
    splits: np.ndarray
    query: np.ndarray | None = None
    gallery: np.ndarray | None = None
    super_classes: np.ndarray | None = None
    super_class_names: Sequence[str] = ()
    groups: np.ndarray | None = None
    boxes: np.ndarray | None = None
    faults: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    source: Path | None = None

    def has(self, split: ListedSplit) -> bool:
        """Whether the split has an image."""
        return bool((self.splits == LISTED_SPLITS.index(split)).any())

    def overlaps(self) -> list[str]:
        """A fault for each class that is in two splits."""
        present = np.zeros((len(self.class_names), len(LISTED_SPLITS)), dtype=bool)
        present[self.labels, self.splits] = True
        return [
            f"{self.source or self.root}: class {self.class_names[label]!r} is in both "
            f"{' and '.join(split for split, is_in in zip(LISTED_SPLITS, present[label], strict=True) if is_in)}; "
            "test classes must be unseen in training"
            for label in (present.sum(1) > 1).nonzero()[0]
        ]

    def images(self, split: ListedSplit | Literal["all"]) -> Dataset:
        """The images of a split, its classes numbered 0..C'-1.

        Raises:
            UserError: the listing has faults, or the split is empty.
        """
        raise_faults([*self.faults, *self.overlaps()])
        number = None if split == "all" else LISTED_SPLITS.index(split)
        rows = np.arange(len(self.labels)) if number is None else (self.splits == number).nonzero()[0]
        if len(rows) == 0:
            raise UserError(
                f"{self.source or self.root}: no {self.sample}s for {split}; expected at least two classes, one to "
                "train, one to test"
            )
        return self.pick(rows)

    def everything(self) -> Dataset:
        """All images, whatever the faults."""
        return self.pick(np.arange(len(self.labels)))

    def pick(self, rows: np.ndarray) -> Dataset:
        """The images of some rows (n,) int64, whatever the faults."""
        return ListedImages(self, rows)

    def labelling(self, rows: np.ndarray) -> dict[str, Any]:
        """What a dataset of some rows needs beside their paths, its classes numbered 0..C'-1."""
        classes, labels = np.unique(self.labels[rows], return_inverse=True)
        # training rows are neither query nor gallery: there each image searches all others
        searches = self.query is not None and bool(self.query[rows].any())
        return {
            "labels": torch.from_numpy(labels.astype(np.int64)),
            "class_names": [self.class_names[int(label)] for label in classes],
            "query": picked(self.query, rows) if searches else None,
            "gallery": picked(self.gallery, rows) if searches else None,
            "super_classes": picked(self.super_classes, classes),
            "groups": picked(self.groups, rows),
        }


class ListedImages(Dataset):
    """Image files of a listing.

    Args:
        listing: names and labels.
        rows: (n,) int64, which of its images.
    """

    def __init__(self, listing: Listing, rows: np.ndarray) -> None:
        super().__init__(
            **listing.labelling(rows), paths=PickedPaths(listing.names, rows, prefix=f"{listing.root}{os.sep}")
        )
        self.boxes = None if listing.boxes is None else listing.boxes[rows]

    def box(self, index: int) -> Box | None:
        """The box of image ``index`` to take; None for all of it."""
        if self.boxes is None or np.isnan(self.boxes[index]).any():
            return None
        left, top, right, bottom = self.boxes[index].tolist()
        return left, top, right, bottom

    def key(self, index: int) -> str:
        box = self.box(index)
        return self.paths[index] if box is None else f"{self.paths[index]} {box}"

    def sample(self, index: int) -> Tensor:
        return read_image(self.paths[index], self.box(index))


def picked(values: np.ndarray | None, rows: np.ndarray) -> Tensor | None:
    """Some rows as a tensor, where there are values."""
    return None if values is None else torch.from_numpy(values[rows])


class ListedRows:
    """Images collected one by one, for the datasets whose lists are read line by line.

    Args:
        root: what the names are relative to.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: list[str] = []
        self.labels: list[int] = []
        self.splits: list[int] = []
        self.faults: list[str] = []

    def add(self, where: str, name: str, label: int, split: ListedSplit) -> bool:
        """Add an image; False, and a fault, if its name leads out of the root. ``where`` says who names it."""
        safe = inside(self.root, name)
        if safe is None:
            self.faults.append(leaves_root(where, name, self.root))
            return False
        self.names.append(safe)
        self.labels.append(label)
        self.splits.append(LISTED_SPLITS.index(split))
        return True

    def listing(self, class_names: Sequence[str], **more: Any) -> Listing:
        """The images so far; ``more`` are other fields of `Listing`."""
        return Listing(
            self.root,
            self.names,
            np.array(self.labels, dtype=np.int64),
            class_names,
            np.array(self.splits, dtype=np.int8),
            faults=self.faults,
            **more,
        )
