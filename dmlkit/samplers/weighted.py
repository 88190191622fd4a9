"""Weighted batches: images drawn at random, more often from rare classes."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveInt
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.samplers.base import ALL_PAIRS, Sampler, SamplerConfig, pairs_among


class WeightedConfig(SamplerConfig, frozen=True):
    """Images drawn with replacement, with weight (images of their class)^-power; for imbalanced data."""

    name: Literal["weighted"] = "weighted"
    batch_size: PositiveInt = 32
    """Number of images in a batch, over all ranks."""
    power: Annotated[float, Field(ge=0, le=1)] = 0.5
    """0 weights all images equally, 1 weights all classes equally."""

    @property
    def pairs(self) -> str:
        return pairs_among(1, 1) if self.batch_size == 1 else ALL_PAIRS

    def build(
        self, labels: Tensor, seed: int, super_classes: Tensor | None = None, groups: Tensor | None = None
    ) -> "Weighted":
        return Weighted(labels, seed, batch_size=self.batch_size, power=self.power)


class Weighted(Sampler):
    """Independent draws of images; the expected draws of a class with c images are proportional to c^(1 - power).

    Args:
        labels: (N,) int64.
        seed: see `Sampler`.
        batch_size: number of images in a batch.
        power: how much rare classes are favored, in 0..1.

    Raises:
        UserError: there are fewer images than the batch size.

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
                f"sampler.batch_size: expected at most the {len(labels)} training images, got {batch_size}; "
                "reduce it or add images"
            )
        _, inverse, counts = np.unique(labels.numpy(), return_inverse=True, return_counts=True)
        weights = counts[inverse].astype(np.float64) ** -power
        self.cumulative = np.cumsum(weights / weights.sum())
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.cumulative) // self.batch_size

    def batches(self, epoch: int) -> list[list[int]]:
        draws = self.generator(epoch).random((len(self), self.batch_size))
        # due to rounding, the last sum may be below 1
        return np.searchsorted(self.cumulative, draws).clip(max=len(self.cumulative) - 1).tolist()
