"""Weighted batches: images drawn at random, more often from rare classes."""

from typing import Annotated

import numpy as np
from pydantic import Field

from dmlkit.samplers.random import ImageSampler


class Weighted(ImageSampler, name="weighted"):
    """Images drawn with replacement, with weight (images of their class)^-power; for imbalanced data.

    Independent draws of images; the expected draws of a class with c images are proportional to c^(1 - power).

    Raises:
        UserError: there are fewer images than the batch size.

    Example:
        >>> import torch
        >>> sampler = Weighted(torch.tensor([0] * 99 + [1]), seed=0, batch_size=100, power=1.0)
        >>> 30 < sampler.batches(epoch=0)[0].count(99) < 70
        True
    """

    power: Annotated[float, Field(ge=0, le=1)] = 0.5
    """0 weights all images equally, 1 weights all classes equally."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _, inverse, counts = np.unique(self.labels.numpy(), return_inverse=True, return_counts=True)
        weights = counts[inverse].astype(np.float64) ** -self.power
        self.cumulative = np.cumsum(weights / weights.sum())

    def batches(self, epoch: int) -> list[list[int]]:
        draws = self.generator(epoch).random((len(self), self.batch_size))
        # due to rounding, the last sum may be below 1
        return np.searchsorted(self.cumulative, draws).clip(max=self.num_images - 1).tolist()
