"""Paired batches: two draws of the same classes, for graph consistency."""

from typing import Literal

from pydantic import PositiveInt
from torch import Tensor

from dmlkit.samplers.base import Sampler, SamplerConfig, pairs_among
from dmlkit.samplers.class_balanced import ClassBalanced


class PairedConfig(SamplerConfig, frozen=True):
    """Two draws of the same m classes with n images each, for graph consistency: 2 x m x n images per batch."""

    name: Literal["paired"] = "paired"
    classes_per_batch: PositiveInt = 13
    """m, number of classes in a batch."""
    images_per_class: PositiveInt = 10
    """n, images per class in each of the two draws."""

    @property
    def pairs(self) -> str:
        return pairs_among(self.classes_per_batch, 2 * self.images_per_class)

    def build(
        self, labels: Tensor, seed: int, super_classes: Tensor | None = None, groups: Tensor | None = None
    ) -> "Paired":
        return Paired(labels, seed, classes_per_batch=self.classes_per_batch, images_per_class=self.images_per_class)


class Paired(Sampler):
    """Chen et al., AAAI 2021 (CGML): the first half of a batch is X', the second X'', with the same class order.

    Position i of both halves has the same class. The 2n images of a class are dealt from one shuffled deck, so
    the two draws share an image only if a class has fewer than 2n. Repetitions of an image are then adjacent; so at
    most one image is in both draws, and none is paired with itself: with 5 images per class and n = 10, a fifth of the
    pairs would otherwise be an image and itself, which are consistent for any graph.

    Args:
        labels: (N,) int64.
        seed: see `Sampler`.
        classes_per_batch: m.
        images_per_class: n, in each draw.

    Raises:
        UserError: there are fewer than m classes.

    Example:
        >>> import torch
        >>> labels = torch.arange(12) // 4
        >>> batch = Paired(labels, seed=0, classes_per_batch=2, images_per_class=2).batches(epoch=0)[0]
        >>> first, second = labels[batch].chunk(2)
        >>> torch.equal(first, second), len(set(batch))
        (True, 8)
    """

    def __init__(self, labels: Tensor, seed: int, *, classes_per_batch: int = 13, images_per_class: int = 10) -> None:
        super().__init__(seed)
        self.images_per_class = images_per_class
        self.both = ClassBalanced(
            labels, seed, classes_per_batch=classes_per_batch, images_per_class=2 * images_per_class
        )
        self.batch_size = self.both.batch_size

    def __len__(self) -> int:
        return len(self.both)

    def batches(self, epoch: int) -> list[list[int]]:
        return [self._deal(batch) for batch in self.both.batches(epoch)]

    def _deal(self, batch: list[int]) -> list[int]:
        n = self.images_per_class
        of_classes = [batch[start : start + 2 * n] for start in range(0, len(batch), 2 * n)]
        batch = [image for hand in of_classes for image in sorted(hand, key=hand.index)]  # unchanged without repeats
        hands = [batch[start : start + n] for start in range(0, len(batch), n)]  # alternately X' and X'' of each class
        return [index for half in (hands[::2], hands[1::2]) for hand in half for index in hand]
