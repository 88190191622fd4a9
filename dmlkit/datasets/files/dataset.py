"""The interface of a dataset: labelled images, or vectors, of one split."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dmlkit.datasets.files.paths import PickedPaths
from dmlkit.errors import UserError

if TYPE_CHECKING:
    pass


class Dataset(ABC):
    """Labelled samples: images, or vectors.

    Args:
        labels: (N,) int64 in 0..C-1.
        class_names: C names; ``labels`` index them.
        paths: N names that identify the images, for files their paths.
        query: (N,) bool, the images to search with; None, with ``gallery``, where each image searches all others.
        gallery: (N,) bool, the images to find.
        super_classes: (C,) int64 in 0..S-1, a coarser label of each class, where the dataset has one.
        groups: (N,) int64, equal for images of one camera, burst or video, which are no neighbours of each other in
            evaluation; an image of none has a number of its own. None: no image has a group.

    Attributes:
        num_features: coordinates of a vector; None: the samples are images.
        in_memory: samples cost nothing to read, so loading them needs no worker processes.
        resizing: how images of a cache were resized, a description that equals the transform's; None: not at all.
    """

    num_features: int | None = None
    in_memory = False
    resizing: str | None = None

    def __init__(
        self,
        labels: Tensor,
        class_names: Sequence[str],
        paths: Sequence[str],
        *,
        query: Tensor | None = None,
        gallery: Tensor | None = None,
        super_classes: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> None:
        self.labels = labels
        self.class_names = tuple(class_names)
        self.paths = paths
        self.query, self.gallery = query, gallery
        self.super_classes, self.groups = super_classes, groups

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def sample(self, index: int) -> Tensor:
        """Sample ``index``: an image (3, H, W) uint8 RGB, or a vector (``num_features``,) float32.

        Raises:
            BadImageError: the file cannot be decoded.
        """

    def key(self, index: int) -> str:
        """What tells sample ``index`` from all others, also from another box of the same file."""
        return self.paths[index]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.sample(index), int(self.labels[index])


class BadImageError(UserError):
    """An image file that cannot be read."""


class ClassSubset(Dataset):
    """The samples of some classes of a dataset, relabelled 0..C'-1 in the order given.

    Args:
        dataset: the whole.
        classes: labels to keep.
    """

    def __init__(self, dataset: Dataset, classes: Sequence[int]) -> None:
        relabel = torch.full((len(dataset.class_names),), -1)
        relabel[list(classes)] = torch.arange(len(classes))
        labels = relabel[dataset.labels]
        self.indices = (labels >= 0).nonzero()[:, 0]
        masks = (dataset.query, dataset.gallery)
        query, gallery = (None if mask is None else mask[self.indices] for mask in masks)
        super_classes = dataset.super_classes
        super().__init__(
            labels[self.indices],
            [dataset.class_names[label] for label in classes],
            PickedPaths(dataset.paths, self.indices.numpy().copy()),  # torch moves what it sends to other processes
            query=query,
            gallery=gallery,
            super_classes=None if super_classes is None else super_classes[list(classes)],
            groups=None if dataset.groups is None else dataset.groups[self.indices],
        )
        self.dataset = dataset
        self.num_features = dataset.num_features
        self.in_memory = dataset.in_memory

    def key(self, index: int) -> str:
        return self.dataset.key(int(self.indices[index]))

    def sample(self, index: int) -> Tensor:
        return self.dataset.sample(int(self.indices[index]))
