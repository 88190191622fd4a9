"""The sampler interface: which images share a batch, as a pure function of the seed and the epoch."""

from abc import ABC, abstractmethod

import numpy as np
from torch import Tensor

from dmlkit.component import ComponentConfig

ALL_PAIRS = "of one class and of two"


def pairs_among(classes: int, images: int) -> str:
    """Which pairs a batch of so many classes with so many images each holds.

    Example:
        >>> pairs_among(8, 4), pairs_among(8, 1), pairs_among(1, 4)
        ('of one class and of two', 'of two classes only', 'of one class only')
    """
    if images == 1:
        return "none" if classes == 1 else "of two classes only"
    return "of one class only" if classes == 1 else ALL_PAIRS


class SamplerConfig(ComponentConfig, frozen=True):
    """Root of the sampler family. Batch sizes are global: all ranks of a distributed run share one batch."""

    @property
    def pairs(self) -> str:
        """Which pairs a batch may hold; see `pairs_among`."""
        return ALL_PAIRS

    def build(
        self, labels: Tensor, seed: int, super_classes: Tensor | None = None, groups: Tensor | None = None
    ) -> "Sampler":
        """The sampler for training images with ``labels`` (N,).

        Args:
            labels: (N,) int64.
            seed: see `Sampler`.
            super_classes: (C,) int64, of datasets that have them.
            groups: (N,) int64, likewise; see `Dataset`.
        """
        raise NotImplementedError


class Sampler(ABC):
    """Batches of indices. Each rank takes its contiguous share of a batch, so any number of ranks sees the same.

    Args:
        seed: with the epoch, it alone decides the batches.

    Attributes:
        batch_size: images in every batch.
    """

    batch_size: int

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @abstractmethod
    def __len__(self) -> int:
        """Batches in an epoch."""

    @abstractmethod
    def batches(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch, each of ``batch_size`` indices."""

    def generator(self, epoch: int) -> np.random.Generator:
        """The random numbers of an epoch."""
        return np.random.default_rng([self.seed, epoch])
