"""Class-balanced batches: m classes with n images each."""

from typing import Literal

import numpy as np
from pydantic import PositiveInt
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.samplers.base import Sampler, SamplerConfig, pairs_among
from dmlkit.samplers.drawing.deck import Deck, group_by


class ClassBalancedConfig(SamplerConfig, frozen=True):
    """m classes x n images in every batch; what pair losses need."""

    name: Literal["class_balanced"] = "class_balanced"
    classes_per_batch: PositiveInt = 8
    """m, classes in a batch."""
    images_per_class: PositiveInt = 4
    """n, images of a class in a batch."""

    @property
    def pairs(self) -> str:
        return pairs_among(self.classes_per_batch, self.images_per_class)

    def build(self, labels: Tensor, seed: int, super_classes: Tensor | None = None) -> "ClassBalanced":
        return ClassBalanced(
            labels, seed, classes_per_batch=self.classes_per_batch, images_per_class=self.images_per_class
        )


class ClassBalanced(Sampler):
    """Every batch holds m distinct classes, n images of each.

    Over an epoch any two classes are drawn equally often, give or take one, and so are any two images of a
    class: classes and images are dealt from shuffled decks that are reshuffled when they run out. Only a class
    with fewer than n images repeats one within a batch. An epoch deals about as many images as there are.

    Args:
        labels: (N,) int64.
        seed: see `Sampler`.
        classes_per_batch: m.
        images_per_class: n.

    Raises:
        UserError: there are fewer than m classes.

    Example:
        >>> import torch
        >>> sampler = ClassBalanced(torch.tensor([0, 0, 1, 1, 2, 2]), 0, classes_per_batch=3, images_per_class=2)
        >>> sorted(sampler.batches(epoch=0)[0])
        [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, labels: Tensor, seed: int, *, classes_per_batch: int = 8, images_per_class: int = 4) -> None:
        super().__init__(seed)
        self.images = group_by(labels.numpy())  # the images of each class
        if len(self.images) < classes_per_batch:
            raise UserError(
                f"sampler.classes_per_batch: {classes_per_batch} classes do not fit into "
                f"{len(self.images)} training classes; lower it or add classes"
            )
        self.classes_per_batch, self.images_per_class = classes_per_batch, images_per_class
        self.batch_size = classes_per_batch * images_per_class
        self.num_images = len(labels)

    def __len__(self) -> int:
        return max(1, self.num_images // self.batch_size)

    def batches(self, epoch: int) -> list[list[int]]:
        generator = self.generator(epoch)
        classes = Deck(np.arange(len(self.images)), generator)
        decks = [Deck(images, generator) for images in self.images]
        return [
            [
                index
                for label in classes.deal(self.classes_per_batch)
                for index in decks[label].deal(self.images_per_class)
            ]
            for _ in range(len(self))
        ]
