"""Datasets with changed labels: a long tail of class sizes, and wrong labels."""

import torch
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.paths import PickedPaths


class Relabelled(Dataset):
    """Selected samples of a dataset with new labels; the classes are the same.

    Args:
        dataset: full dataset, without query and gallery.
        rows: (n,) int64, samples to keep.
        labels: (n,) int64, new labels of these samples.
    """

    def __init__(self, dataset: Dataset, rows: Tensor, labels: Tensor) -> None:
        super().__init__(
            labels,
            dataset.class_names,
            PickedPaths(dataset.paths, rows.numpy()),
            super_classes=dataset.super_classes,
            groups=None if dataset.groups is None else dataset.groups[rows],
        )
        self.dataset, self.rows = dataset, rows
        self.num_features, self.in_memory = dataset.num_features, dataset.in_memory

    def key(self, index: int) -> str:
        return self.dataset.key(int(self.rows[index]))

    def sample(self, index: int) -> Tensor:
        return self.dataset.sample(int(self.rows[index]))


def long_tail(labels: Tensor, ratio: float) -> Tensor:
    """Return the rows (n,) to keep so that class sizes decrease geometrically: the first images of each class.

    Class c of C classes with n images each keeps round(n ratio^(-c / (C - 1))) images, so the last keeps n / ratio.

    Args:
        labels: (N,) int64 in 0..C-1.
        ratio: number of images of the first class divided by that of the last, >= 1.

    Example:
        >>> labels = torch.arange(3).repeat_interleave(16)
        >>> labels[long_tail(labels, 4)].bincount().tolist()
        [16, 8, 4]
    """
    classes = int(labels.max()) + 1
    kept = [
        own[: round(len(own) * ratio ** (-label / max(1, classes - 1)))]
        for label in range(classes)
        for own in [(labels == label).nonzero()[:, 0]]
    ]
    return torch.cat(kept).sort().values


def wrong_labels(labels: Tensor, share: float, *, seed: int) -> Tensor:
    """Replace exactly ``round(share N)`` labels by wrong ones, drawn uniformly from the other classes.

    Args:
        labels: (N,) int64 in 0..C-1, C at least 2.
        share: share of wrong labels, in [0, 1].
        seed: seed of the choice of labels and of their replacements.

    Example:
        >>> labels = torch.arange(4).repeat_interleave(5)
        >>> int((wrong_labels(labels, 0.2, seed=0) != labels).sum())
        4
    """
    generator = torch.Generator().manual_seed(seed)
    classes, count = int(labels.max()) + 1, round(share * len(labels))
    rows = torch.randperm(len(labels), generator=generator)[:count]
    changed = labels.clone()
    changed[rows] = (labels[rows] + torch.randint(1, classes, (count,), generator=generator)) % classes
    return changed
