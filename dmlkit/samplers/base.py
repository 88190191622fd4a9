"""The sampler interface: selects the images of each batch as a pure function of the seed, the epoch and its state."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from torch import Tensor

from dmlkit.component import Component, ComponentConfig, option
from dmlkit.manifolds.base import Manifold

ALL_PAIRS = "of the same class and of different classes"


def pairs_among(classes: int, images: int) -> str:
    """Return which pairs a batch of this many classes with this many images each contains."""
    if images == 1:
        return "none" if classes == 1 else "of different classes only"
    return "of the same class only" if classes == 1 else ALL_PAIRS


class SamplerConfig(ComponentConfig, frozen=True):
    """Root of the sampler family. Batch sizes are global: all ranks of a distributed run share one batch."""

    takes_several_labels: ClassVar[bool] = False
    """Whether images may have several labels."""

    @property
    def pairs(self) -> str:
        """The pairs that a batch may contain; see `pairs_among`."""
        return ALL_PAIRS

    @abstractmethod
    def build(
        self,
        labels: Tensor,
        seed: int,
        super_classes: Tensor | None = None,
        groups: Tensor | None = None,
        members: Tensor | None = None,
    ) -> "Sampler":
        """Return the sampler for training images with ``labels`` (N,); see `Sampler`."""


class Sampler(Component, ABC, family=SamplerConfig):
    """Batches of indices.

    Each rank takes a contiguous share of a batch, so the batches do not depend on the number of ranks. A sampler that
    learns from the embeddings of earlier epochs has a `state`, which checkpoints contain.
    """

    labels: Tensor = option(kw_only=False)
    """(N,) int64, the labels of the training images."""
    seed: int = option(kw_only=False)
    """With the epoch, it determines the batches."""
    super_classes: Tensor | None = option(default=None, kw_only=False)
    """(C,) int64, the super-class of each class, for datasets that have them."""
    groups: Tensor | None = option(default=None, kw_only=False)
    """(N,) int64, for datasets that have them; see `Dataset`."""
    members: Tensor | None = option(default=None, kw_only=False)
    """(C, L) bool, which of several labels each class has; None if each image has one label."""
    batch_size: int = option(init=False)
    """Number of images in every batch."""

    @property
    def pairs(self) -> str:
        """The pairs that a batch may contain; see `pairs_among`. It depends on the options only."""
        return ALL_PAIRS

    def __len__(self) -> int:
        """Return the number of batches in an epoch; by default it has about as many images as the training set."""
        return max(1, len(self.labels) // self.batch_size)

    @abstractmethod
    def batches(self, epoch: int) -> list[list[int]]:
        """Return the batches of an epoch, each of ``batch_size`` indices."""

    def set_epoch(self, epoch: int, manifold: Manifold) -> None:
        """Prepare for an epoch, counted from 0; called before each epoch, also before one that is resumed.

        Args:
            manifold: geometry of the embeddings that `learn_from` received.
        """

    def learn_from(self, embeddings: Tensor, labels: Tensor, manifold: Manifold) -> None:
        """Take what training computes anyway; most samplers ignore it. All ranks receive the same.

        Args:
            embeddings: (B, D) points of a batch of all ranks, without gradient.
        """

    def state(self) -> dict[str, Tensor]:
        """Return what the next batches depend on apart from seed and epoch; nothing for most samplers."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the `state` of a checkpoint.

        Raises:
            ValueError: it is that of other training images.
        """

    def generator(self, epoch: int) -> np.random.Generator:
        """Return the random generator of an epoch."""
        return np.random.default_rng([self.seed, epoch])
