"""Interface of the labeled images or vectors of one split."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dmlkit.datasets.files.class_names import Levels, levels_of, members_of
from dmlkit.datasets.files.samples import ImageSamples, Samples
from dmlkit.errors import some_of
from dmlkit.files.image_file import MAX_PIXELS, Box
from dmlkit.files.paths import PickedPaths


class Dataset(ABC):
    """Labeled images or vectors.

    Args:
        labels: (N,) int64 in 0..C-1; -1 for a sample without a label, which can only be embedded.
        class_names: C names, indexed by ``labels``.
        paths: N names that identify the samples; for files their paths.
        query: (N,) bool, the query images; None, as for ``gallery``, if each image is compared with all others.
        gallery: (N,) bool, the images to find.
        groups: (N,) int64, equal for images of one camera, burst or video, which evaluation does not count as neighbors
            of each other; an image without a group has a unique number. None if no image has a group.
        levels: hierarchy of the classes; None if there is none.
        separator: separator of the labels in ``class_names``, each of which is then a set of labels; None if each image
            has one label.

    Attributes:
        kind: kind of the samples, images by default; vectors of 8 numbers are ``VectorSamples(8)``.
        in_memory: whether samples are in memory, so that loading them needs no worker processes.
        boxes: (N, 4) float64, left, top, right, bottom in pixels of the image files, NaN for the full image; or None.
        margin: margin of all boxes, see `Box`.
        left_out: one message per entry that is no sample, because it is wrong.
        table_rows: row of each sample in the table that lists the queries; empty if none does.
        max_pixels: largest number of decoded pixels of an image, see `read_image`.
    """

    kind: Samples = ImageSamples()
    in_memory = False
    boxes: np.ndarray | None = None
    margin = 0.0
    left_out: Sequence[str] = ()
    table_rows: Sequence[int] = ()
    max_pixels = MAX_PIXELS

    def __init__(
        self,
        labels: Tensor,
        class_names: Sequence[str],
        paths: Sequence[str],
        *,
        query: Tensor | None = None,
        gallery: Tensor | None = None,
        groups: Tensor | None = None,
        levels: Levels | None = None,
        separator: str | None = None,
    ) -> None:
        self.labels = labels
        self.class_names = tuple(class_names)
        self.paths = paths
        self.query, self.gallery = query, gallery
        self.groups = groups
        self.levels: Levels = levels or {}
        self.separator = separator

    def limit(self, max_pixels: int) -> None:
        """Set the largest number of decoded pixels."""
        self.max_pixels = max_pixels

    @property
    def super_classes(self) -> Tensor | None:
        """The level above the classes, (C,) int64; None if there is none."""
        return list(self.levels.values())[-2] if self.levels else None

    @cached_property
    def members(self) -> Tensor | None:
        """Which labels each class has, (C, L) bool, if classes are sets of labels; else None."""
        names, separator = self.class_names, self.separator
        return None if separator is None else torch.from_numpy(members_of(names, separator)[1])

    @property
    def num_features(self) -> int | None:
        """Number of coordinates of a vector; None for other kinds of samples."""
        return self.kind.num_features

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def sample(self, index: int) -> Tensor:
        """Return a sample: an image (3, H, W) uint8 RGB, a vector (``num_features``,) float32, or as `kind` says."""

    def key(self, index: int) -> str:
        """Return a string that identifies a sample, also among several boxes of the same file."""
        box = self.box(index)
        return self.paths[index] if box is None else f"{self.paths[index]} {box.text}"

    def box(self, index: int) -> Box | None:
        """Return the box of a sample; None for a full image, and for other samples."""
        if self.boxes is None or np.isnan(self.boxes[index]).any():
            return None
        left, top, right, bottom = self.boxes[index].tolist()
        return Box(left, top, right, bottom, self.margin)

    def file(self, index: int) -> str | None:
        """Return the path of the image file that is a whole sample; None for a box of one, and for other samples."""
        return None

    def groups_of(self, rows: Tensor) -> Tensor:
        """Return the groups (n,) of samples by their rows (n,); in a dataset without groups each sample is one."""
        return rows if self.groups is None else self.groups[rows]

    def label_names(self, labels: Tensor) -> list[str | None]:
        """Return the names of labels (n,); None for -1, a sample without a label."""
        return [None if label < 0 else self.class_names[label] for label in labels.tolist()]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.sample(index), int(self.labels[index])


class PickedSamples(Dataset):
    """Some samples (n,) of a dataset, with labels (n,) into some of its classes, or else into all of them."""

    def __init__(self, dataset: Dataset, rows: Tensor, labels: Tensor, classes: Sequence[int] | None = None) -> None:
        classes = range(len(dataset.class_names)) if classes is None else classes
        of_samples = dataset.query, dataset.gallery, dataset.groups
        query, gallery, groups = (None if values is None else values[rows] for values in of_samples)
        super().__init__(
            labels,
            [dataset.class_names[label] for label in classes],
            PickedPaths(dataset.paths, rows.numpy()),
            query=query,
            gallery=gallery,
            groups=groups,
            levels=levels_of(dataset.levels, classes),
            separator=dataset.separator,
        )
        self.dataset, self.rows = dataset, rows
        self.kind, self.in_memory, self.max_pixels = dataset.kind, dataset.in_memory, dataset.max_pixels

    def limit(self, max_pixels: int) -> None:
        super().limit(max_pixels)
        self.dataset.limit(max_pixels)

    def key(self, index: int) -> str:
        return self.dataset.key(int(self.rows[index]))

    def file(self, index: int) -> str | None:
        return self.dataset.file(int(self.rows[index]))

    def box(self, index: int) -> Box | None:
        return self.dataset.box(int(self.rows[index]))

    def sample(self, index: int) -> Tensor:
        return self.dataset.sample(int(self.rows[index]))


def lone_classes(images: Dataset) -> tuple[list[str], list[str], int]:
    """Return the classes none of whose queries has an image to find, and the number of the other classes with queries.

    The first have no second image to find, or have some in one group alone. Images that have several labels are not
    looked at: they find those that share one.
    """
    labels, classes = images.labels, len(images.class_names)
    if images.members is not None:
        return [], [], classes
    everything = torch.ones(len(labels), dtype=torch.bool)
    query, gallery = (everything if mask is None else mask for mask in (images.query, images.gallery))

    def able(groups: Tensor) -> Tensor:
        """Return which classes (C,) have a query with an image to find, which none of its own group is."""
        pairs = (labels * len(labels) + groups).unique(return_inverse=True)[1]  # groups count from 0
        of_class = labels[gallery].bincount(minlength=classes)[labels]
        of_pair = pairs[gallery].bincount(minlength=len(labels))[pairs]
        return labels[query & (of_class > of_pair)].bincount(minlength=classes) > 0

    queried, alone = labels[query].bincount(minlength=classes) > 0, able(torch.arange(len(labels)))
    paired = alone if images.groups is None else able(images.groups.unique(return_inverse=True)[1])
    masks = queried & ~alone, queried & alone & ~paired
    single, grouped = ([images.class_names[label] for label in mask.nonzero()[:, 0].tolist()] for mask in masks)
    return single, grouped, int((queried & paired).sum())


def search_faults(images: Dataset, split: str, where: str) -> tuple[str | None, list[str]]:
    """Return why a split cannot be searched, or None, and remarks on the classes of it that cannot.

    Training images are not searched, so that there are only remarks.
    """
    alone, grouped, others = lone_classes(images)
    kind, sample = ("training" if split == "train" else split), images.kind.name
    classes = f"of {len(alone) + len(grouped) + others} {kind} classes"
    if split == "train":
        notes: list[str] = []
        if alone:
            detail = f"a single {sample}, which has no positive: {some_of(alone)}"
            notes.append(f"{where}: {len(alone)} {classes} have {detail}")
        if grouped and not others:
            notes.append(
                f"{where}: all {sample}s of each training class are of one group (camera, burst, video), so that a "
                f"model may learn the groups instead of the classes; add {sample}s of other groups"
            )
        return None, notes
    if not others and grouped:
        return (
            f"{where}: nothing to find in the {split} split: all {sample}s of each class are of one group (camera, "
            "burst, video), and those of one group are not searched; give classes several groups, or leave out the "
            'column with --column group=, in a recipe dataset.columns={group: ""} or dataset.group=null',
            [],
        )
    if not others:
        absent = f"no class has two {sample}s" if images.gallery is None else "the gallery has none of its classes"
        return f"{where}: nothing to find in the {split} split: {absent}", []
    notes: list[str] = []
    if alone:
        reason = f"no {sample} in the gallery, so theirs are"
        if images.gallery is None:
            reason = f"no second {sample} to find, so theirs are searched but are"
        notes.append(f"{where}: {len(alone)} {classes} have {reason} no queries: {some_of(alone)}")
    if grouped:
        notes.append(
            f"{where}: {len(grouped)} {classes} have all {sample}s in one group (camera, burst, video), which are not "
            f"searched for each other, so they are no queries: {some_of(grouped)}"
        )
    return None, notes


def class_subset(dataset: Dataset, classes: Sequence[int]) -> Dataset:
    """Return the samples of some classes, relabeled 0..C'-1 in the given order."""
    relabel = torch.full((len(dataset.class_names),), -1)
    relabel[list(classes)] = torch.arange(len(classes))
    labels = relabel[dataset.labels]
    rows = (labels >= 0).nonzero()[:, 0]
    return PickedSamples(dataset, rows, labels[rows], classes)


def with_classes(dataset: Dataset, names: Sequence[str]) -> Dataset:
    """Return the samples of the classes ``names`` in this order, without those that it lacks; all if it lacks all."""
    index_of = {name: index for index, name in enumerate(dataset.class_names)}
    classes = [index_of[name] for name in names if name in index_of]
    return dataset if classes in ([], [*range(len(index_of))]) else class_subset(dataset, classes)


def evenly_spread(values: Tensor, count: int) -> Tensor:
    """Return at most ``count`` of some values (n,), evenly spread.

    Example:
        >>> evenly_spread(torch.arange(10), 4).tolist(), evenly_spread(torch.arange(3), 4).tolist()
        ([0, 3, 6, 9], [0, 1, 2])
    """
    last, most = max(0, len(values) - 1), min(count, len(values))
    return values[torch.linspace(0, last, most, dtype=torch.float64).round().long()]  # float32 counts to 17 million
