"""Weighted batches: images drawn at random, those of rare classes more often."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveInt
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.samplers.base import ALL_PAIRS, Sampler, SamplerConfig, pairs_among


class WeightedConfig(SamplerConfig, frozen=True):
    """Images drawn with replacement, in proportion to (images of their class)^-power; for unbalanced data."""

    name: Literal["weighted"] = "weighted"
    batch_size: PositiveInt = 32
    """Images in a batch, of all ranks together."""
    power: Annotated[float, Field(ge=0, le=1)] = 0.5
    """0 draws every image alike, 1 every class alike."""

    @property
    def pairs(self) -> str:
        return pairs_among(1, 1) if self.batch_size == 1 else ALL_PAIRS

    def build(
        self, labels: Tensor, seed: int, super_classes: Tensor | None = None, groups: Tensor | None = None
    ) -> "Weighted":
        return Weighted(labels, seed, batch_size=self.batch_size, power=self.power)


class Weighted(Sampler):
    """Independent draws of images; the expected number of draws of a class of c images goes with c^(1 - power).

    Args:
        labels: (N,) int64.
        seed: see `Sampler`.
        batch_size: images in a batch.
        power: how far rare classes are favoured, in 0..1.

    Raises:
        UserError: there are fewer images than a batch holds.

    Example:
        >>> import torch
        >>> sampler = Weighted(torch.tensor([0] * 99 + [1]), seed=0, batch_size=100, power=1.0)
        >>> 30 < sampler.batches(epoch=0)[0].count(99) < 70
        True
    """

    def __init__(self, labels: Tensor, seed: int, *, batch_size: int = 32, power: float = 0.5) -> None:
        super().__init__(seed)
        if len(labels) < batch_size:
            raise UserError(
                f"sampler.batch_size: {batch_size} images do not fit into {len(labels)} training images; "
                "lower it or add images"
            )
        _, inverse, counts = np.unique(labels.numpy(), return_inverse=True, return_counts=True)
        weights = counts[inverse].astype(np.float64) ** -power
        self.cumulative = np.cumsum(weights / weights.sum())
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.cumulative) // self.batch_size

    def batches(self, epoch: int) -> list[list[int]]:
        draws = self.generator(epoch).random((len(self), self.batch_size))
        # rounding may leave the last sum below 1
        return np.searchsorted(self.cumulative, draws).clip(max=len(self.cumulative) - 1).tolist()
