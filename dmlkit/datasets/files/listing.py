"""Listings of a dataset: paths, labels and splits, with all problems, before any image is opened."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dmlkit.datasets.files.class_names import members_of
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import read_image
from dmlkit.errors import OptionError, UserError, counted, some_of, warn_once
from dmlkit.files.columns import in_days, time_of
from dmlkit.files.exif import exif_sightings
from dmlkit.files.paths import DATA_CHECK, PickedPaths, inside, leaves_root, raise_faults

NO_QUERIES = "does not support separate query and gallery images, which the dataset has; use official"
ListedSplit = Literal["train", "validation", "test"]
LISTED_SPLITS: tuple[ListedSplit, ...] = ("train", "validation", "test")


@dataclass(frozen=True)
class Listing:
    """Listing of the images of a dataset."""

    root: Path  # folder of the images
    names: Any  # N paths relative to the root
    labels: np.ndarray  # (N,) int64 into ``class_names``; -1 for an image without a label, which is in no split
    class_names: Sequence[str]  # C names in the order of their labels
    splits: np.ndarray  # (N,) int8, positions in `LISTED_SPLITS`
    query: np.ndarray | None = None  # (N,) bool, or None; see `Dataset`
    gallery: np.ndarray | None = None  # (N,) bool, or None
    super_classes: np.ndarray | None = None  # (C,) int64, numbers of the super-classes, or None
    groups: np.ndarray | None = None  # (N,) int64, or None; see `Dataset`
    boxes: np.ndarray | None = None
    """(N, 4) float64, left, top, right, bottom in pixels, NaN for the full image; or None."""
    faults: list[str] = field(default_factory=list[str])
    """Problems, one line each; images with a problem are not listed."""
    notes: list[str] = field(default_factory=list[str])  # remarks on what is unusual but not wrong
    source: Path | None = None  # file that errors refer to, a table; None for the root
    separator: str | None = None  # see `Dataset`
    times: Any = None  # N texts of when images were taken, None for an empty cell; or None
    sample: str = "image"  # name of the kind of the samples
    make: Callable[["Listing", np.ndarray], Dataset] | None = None
    """Function that returns the samples of some rows; None for image files."""

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
        if not (shared := self.shared_classes()):
            return []
        are, ways = counted(len(shared), "label is", "labels are"), "all to train"
        if self.separator is None:
            are = counted(len(shared), "class is", "classes are")
            ways = "images to search test images of known classes, halves to divide the classes, or all to train"
        return [
            f"{self.source or self.root}: {are} in several splits ({some_of(shared)}), but those of the test split "
            f"must be unseen in training; use dataset.split={ways} on all images and then identify known classes with "
            "a gallery"
        ]

    def of_known_classes(self, share: float, *, by_time: bool = False) -> "Listing":
        """Return the listing with test images of classes that are trained on.

        They are those of the data's own splits, if these share classes; otherwise the last images of each class, by
        their time or in the order of the listing. Images of one time, or in that order of one group, are in one split;
        those without a time are in none. ``share`` is that of the images of each class to train on.
        """
        if self.query is not None:
            raise OptionError("dataset.split", f"images and time {NO_QUERIES}")
        where, notes, order = self.source or self.root, list(self.notes), self._order(by_time)
        if by_time:
            undated = np.flatnonzero(np.isnan(order) & (self.labels >= 0))
            if len(undated) == (self.labels >= 0).sum():
                raise OptionError(
                    "dataset.split",
                    f"{where}: no {self.sample} has a time; expected a column time of a table, or EXIF data",
                )
            if len(undated):
                have = counted(len(undated), f"{self.sample} has", f"{self.sample}s have")
                examples = some_of([self.names[row] for row in undated.tolist()])
                notes.append(f"{where}: {have} no time and are left out of all splits: {examples}")
        elif self.shared_classes():
            return self
        rows = np.flatnonzero((self.labels >= 0) & ~np.isnan(order))
        sizes = np.bincount(self.labels[rows], minlength=len(self.class_names))
        wanted = np.floor(np.round(sizes * (1 - share), 6) + 0.5).clip(min=1).astype(np.int64) * (sizes > 1)
        splits = np.full(len(self.labels), -1, dtype=np.int8)
        splits[rows] = LISTED_SPLITS.index("train")
        tested = self._last_images(rows, order, wanted, kept=1)
        splits[tested] = LISTED_SPLITS.index("test")
        untested = np.flatnonzero((sizes > 0) & (np.bincount(self.labels[tested], minlength=len(sizes)) == 0))
        if len(untested):
            have = counted(len(untested), "class has", "classes have")
            unit = "time" if by_time else self.sample if self.groups is None else "group"
            examples = some_of([self.class_names[label] for label in untested.tolist()])
            notes.append(f"{where}: {have} a single {unit}, which is trained on and searched, not tested: {examples}")
        return replace(self, splits=splits, notes=notes)

    def with_validation_images(self, fraction: float, *, by_time: bool) -> "Listing":
        """Return the listing with a share of its training images for validation, unless it has validation images.

        They are the last ones of classes with at least three; two of each remain, so that each has a positive.
        """
        if len(self.rows_of("validation")) or not fraction:
            return self
        rows = self.rows_of("train")
        sizes = np.bincount(self.labels[rows], minlength=len(self.class_names))
        quota = np.where(sizes > 2, sizes * fraction, 0).cumsum().round(6)
        wanted = np.minimum(np.diff(np.floor(quota), prepend=0).astype(np.int64), np.maximum(sizes - 2, 0))
        held_out = self._last_images(rows, self._order(by_time), wanted, kept=2)
        if not len(held_out):
            raise OptionError(
                "dataset.validation_fraction",
                f"{fraction} of {len(rows)} training {self.sample}s holds out none for validation, because two of each "
                "class remain; use 0 for no validation",
            )
        splits = self.splits.copy()
        splits[held_out] = LISTED_SPLITS.index("validation")
        return replace(self, splits=splits)

    def _last_images(self, rows: np.ndarray, order: np.ndarray, wanted: np.ndarray, kept: int) -> np.ndarray:
        """Return which of some rows (n,) are the last ``wanted`` (C,) of each class, or as near as possible.

        They are sorted by ``order`` (N,), in which equal ones stay together; at least ``kept`` of a class remain.
        """
        sorted_rows = rows[np.lexsort((order[rows], self.labels[rows]))]
        ends = np.cumsum(np.bincount(self.labels[rows], minlength=len(wanted)))
        last_rows = [np.zeros(0, dtype=np.int64)]
        for label in np.flatnonzero(wanted).tolist():
            class_rows = sorted_rows[ends[label - 1] if label else 0 : ends[label]]
            cuts = 1 + np.flatnonzero(np.diff(order[class_rows]))
            cuts = cuts[cuts >= kept]
            if len(cuts):
                last_rows.append(class_rows[cuts[np.abs(cuts - (len(class_rows) - wanted[label])).argmin()] :])
        return np.sort(np.concatenate(last_rows))

    def _order(self, by_time: bool) -> np.ndarray:
        """Return what images are sorted by, (N,): their times, or the first rows of their groups."""
        if by_time:
            return self.days()
        if self.groups is None:
            return np.arange(len(self.labels))
        _, first, inverse = np.unique(self.groups, return_index=True, return_inverse=True)
        return first[inverse]

    def days(self) -> np.ndarray:
        """Return when the images were taken, (N,) float64 in days since 1970; nan for unknown times, see `_times`."""
        return np.array([in_days(time) for time in self._times()])

    def _times(self) -> list[datetime | None]:
        """Return when the images were taken, by the table, and where it has no time by EXIF."""
        times, faults = list[datetime | None](), list[str]()
        for row in range(len(self.labels)):
            cell = None if self.times is None else self.times[row]
            try:
                times.append(time_of(cell, f"{self.source or self.root}: {self.names[row]}"))
            except UserError as error:
                faults.append(str(error))
        raise_faults(faults)
        without = [row for row, time in enumerate(times) if time is None]
        seen_at = exif_sightings([f"{self.root}/{self.names[row]}" for row in without])
        for row, seen in zip(without, seen_at, strict=True):
            times[row] = time_of(seen.time, "")
        return times

    def grouped_by_day(self) -> "Listing":
        """Return the listing with the images of each class of one day as a group, and days as times.

        The day is that of the camera's clock. An image without a time is a group of its own.
        """
        dates = [None if time is None else time.date().isoformat() for time in self._times()]
        undated = [self.names[row] for row, day in enumerate(dates) if day is None]
        notes = list(self.notes)
        if undated:
            have = counted(len(undated), f"{self.sample} has", f"{self.sample}s have")
            remark = f"{have} no time, each of which is a group of its own: {some_of(undated)}"
            notes.append(f"{self.source or self.root}: {remark}")
        numbers: dict[tuple[int, str], int] = {}
        groups = [
            len(dates) + row if day is None else numbers.setdefault((label, day), len(numbers))
            for row, (label, day) in enumerate(zip(self.labels.tolist(), dates, strict=True))
        ]
        return replace(self, groups=np.array(groups, dtype=np.int64), times=dates, notes=notes)

    def keys(self) -> list[str]:
        """Return N texts that name the images, below the root, also if it moves."""
        names = [self.names[row] for row in range(len(self.labels))]
        if self.boxes is None:
            return names
        boxes = [box.tolist() for box in self.boxes]
        return [f"{name} {box}" if box[0] == box[0] else name for name, box in zip(names, boxes, strict=True)]

    def searched(self, split: ListedSplit) -> Dataset:
        """Return the images of a split as queries, with those of the splits before it as their gallery."""
        number = LISTED_SPLITS.index(split)
        query, gallery = self.splits == number, (self.splits >= 0) & (self.splits < number)
        return replace(self, query=query, gallery=gallery).pick((query | gallery).nonzero()[0])

    def images(self, split: ListedSplit | Literal["all"]) -> Dataset:
        """Return the images of a split, with classes numbered 0..C'-1."""
        raise_faults([*self.faults, *([] if split == "all" else self.overlaps())], DATA_CHECK)
        return self.part(split)

    def part(self, split: ListedSplit | Literal["all"]) -> Dataset:
        """Return the images of a split, even if there are problems, unless it is empty."""
        rows = (self.labels >= 0).nonzero()[0] if split == "all" else self.rows_of(split)
        if len(rows) == 0:
            raise UserError(
                f"{self.source or self.root}: no {self.sample}s for {split}; expected at least two classes for "
                "training and two for testing"
            )
        return self.pick(rows)

    def everything(self) -> Dataset:
        """Return all listed images, even if there are problems."""
        return self.pick(np.arange(len(self.labels)))

    def pick(self, rows: np.ndarray) -> Dataset:
        """Return the images of some rows (n,) int64, even if there are problems."""
        return (self.make or ListedImages)(self, rows)

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
        prefix = "" if listing.root == Path() else f"{listing.root}{os.sep}"
        super().__init__(**listing.labelling(rows), paths=PickedPaths(listing.names, rows, prefix=prefix))
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
