"""Hierarchical batches: classes from few super-classes, which are hard to distinguish."""

from math import prod

import numpy as np
from pydantic import PositiveInt

from dmlkit.errors import OptionError
from dmlkit.samplers.base import Sampler, pairs_among
from dmlkit.samplers.class_balanced import Deck, group_by


class Hierarchical(Sampler, name="hierarchical"):
    """s super-classes x m of their classes x n images; for datasets with super-classes (sop, inshop, table) or levels.

    Super-classes, the classes of a super-class and the images of a class are dealt from shuffled decks, so any two of
    them are drawn equally often over an epoch, give or take one hand. Classes of a small super-class are drawn more
    often than those of a large one. An epoch has about as many images as the training set.

    Raises:
        UserError: there are fewer than s super-classes, or one of them has fewer than m classes.

    Example:
        >>> import torch
        >>> labels, super_classes = torch.arange(16) // 2, torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
        >>> sampler = Hierarchical(labels, 0, super_classes, super_classes_per_batch=1, classes_per_super_class=4,
        ...                        images_per_class=2)
        >>> sorted(labels[sampler.batches(epoch=0)[0]].unique().tolist()) in ([0, 1, 2, 3], [4, 5, 6, 7])
        True
    """

    super_classes_per_batch: PositiveInt = 2
    """s, super-classes in a batch."""
    classes_per_super_class: PositiveInt = 8
    """m, classes per super-class in a batch."""
    images_per_class: PositiveInt = 4
    """n, images per class in a batch."""
    level: str | None = None
    """Level of the dataset's hierarchy whose classes are the super-classes; null for the one above the classes."""

    @property
    def pairs(self) -> str:
        return pairs_among(self.super_classes_per_batch * self.classes_per_super_class, self.images_per_class)

    def __post_init__(self) -> None:
        if self.super_classes is None:
            raise OptionError(
                "sampler",
                "hierarchical needs a dataset with super-classes; use sop, inshop, a table, or dataset.levels",
            )
        self.images = group_by(self.labels.numpy())
        self.classes = group_by(self.super_classes.numpy())
        if len(self.classes) < self.super_classes_per_batch:
            raise OptionError(
                "sampler.super_classes_per_batch",
                f"expected at most the "
                f"{len(self.classes)} super-classes of the dataset, got {self.super_classes_per_batch}; reduce it",
            )
        smallest = min(len(classes) for classes in self.classes)
        if smallest < self.classes_per_super_class:
            raise OptionError(
                "sampler.classes_per_super_class",
                f"expected at most the {smallest} classes "
                f"of the smallest super-class, got {self.classes_per_super_class}; reduce it",
            )
        self.counts = self.super_classes_per_batch, self.classes_per_super_class, self.images_per_class
        self.batch_size = prod(self.counts)
        self.num_images = len(self.labels)

    def __len__(self) -> int:
        return max(1, self.num_images // self.batch_size)

    def batches(self, epoch: int) -> list[list[int]]:
        generator = self.generator(epoch)
        super_classes, classes_each, images_each = self.counts
        top = Deck(np.arange(len(self.classes)), generator)
        middle = [Deck(classes, generator) for classes in self.classes]
        bottom = [Deck(images, generator) for images in self.images]
        return [
            [
                index
                for super_class in top.deal(super_classes)
                for label in middle[super_class].deal(classes_each)
                for index in bottom[label].deal(images_each)
            ]
            for _ in range(len(self))
        ]
