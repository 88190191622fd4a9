"""The sampler interface: selects the images of each batch as a pure function of the seed and the epoch."""

from abc import ABC, abstractmethod

import numpy as np
from torch import Tensor

from dmlkit.component import ComponentConfig

ALL_PAIRS = "of the same class and of different classes"


def pairs_among(classes: int, images: int) -> str:
    """Return which pairs a batch of this many classes with this many images each contains.

    Example:
        >>> pairs_among(8, 4), pairs_among(8, 1), pairs_among(1, 4)
        ('of the same class and of different classes', 'of different classes only', 'of the same class only')
    """
    if images == 1:
        return "none" if classes == 1 else "of different classes only"
    return "of the same class only" if classes == 1 else ALL_PAIRS


class SamplerConfig(ComponentConfig, frozen=True):
    """Root of the sampler family. Batch sizes are global: all ranks of a distributed run share one batch."""

    @property
    def pairs(self) -> str:
        """The pairs that a batch may contain; see `pairs_among`."""
        return ALL_PAIRS

    @abstractmethod
    def build(
        self, labels: Tensor, seed: int, super_classes: Tensor | None = None, groups: Tensor | None = None
    ) -> "Sampler":
        """Return the sampler for training images with ``labels`` (N,).

        Args:
            labels: (N,) int64.
            seed: see `Sampler`.
            super_classes: (C,) int64, for datasets that have them.
            groups: (N,) int64, for datasets that have them; see `Dataset`.
        """


class Sampler(ABC):
    """Batches of indices. Each rank takes a contiguous share of a batch, so the batches do not depend on their number.

    Args:
        seed: with the epoch, it determines the batches.

    Attributes:
        batch_size: number of images in every batch.
    """

    batch_size: int

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches in an epoch."""

    @abstractmethod
    def batches(self, epoch: int) -> list[list[int]]:
        """Return the batches of an epoch, each of ``batch_size`` indices."""

    def generator(self, epoch: int) -> np.random.Generator:
        """Return the random generator of an epoch."""
        return np.random.default_rng([self.seed, epoch])
