"""Paired batches: two draws of the same classes, for graph consistency."""

from pydantic import PositiveInt

from dmlkit.samplers.base import Sampler, pairs_among
from dmlkit.samplers.class_balanced import ClassBalanced


class Paired(Sampler, name="paired"):
    """Two draws of the same m classes with n images each, for graph consistency: 2 x m x n images per batch.

    Chen et al., AAAI 2021 (CGML): the first half of a batch is X', the second X'', with the same class order.

    Position i of both halves has the same class. The 2n images of a class are dealt from one shuffled deck, so
    the two draws share an image only if a class has fewer than 2n. Repetitions of an image are then adjacent; so at
    most one image is in both draws, and none is paired with itself: with 5 images per class and n = 10, a fifth of the
    pairs would otherwise be an image and itself, which are consistent for any graph.

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

    classes_per_batch: PositiveInt = 13
    """m, number of classes in a batch."""
    images_per_class: PositiveInt = 10
    """n, images per class in each of the two draws."""

    @property
    def pairs(self) -> str:
        return pairs_among(self.classes_per_batch, 2 * self.images_per_class)

    def __post_init__(self) -> None:
        images = 2 * self.images_per_class
        self.both = ClassBalanced(
            self.labels, self.seed, classes_per_batch=self.classes_per_batch, images_per_class=images
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
