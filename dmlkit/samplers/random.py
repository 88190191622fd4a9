"""Images drawn without regard to the other images of a batch: shuffled, or more often from rare classes."""

from typing import Annotated

import numpy as np
from pydantic import Field, PositiveInt

from dmlkit.errors import OptionError
from dmlkit.samplers.base import ALL_PAIRS, Sampler, pairs_among


class ImageSampler(Sampler):
    """Base of the samplers that draw images without regard to the other images of a batch."""

    batch_size: PositiveInt = 32
    """Number of images in a batch, over all ranks."""

    @property
    def pairs(self) -> str:
        return pairs_among(1, 1) if self.batch_size == 1 else ALL_PAIRS

    def __post_init__(self) -> None:
        if len(self.labels) < self.batch_size:
            raise OptionError(
                "sampler.batch_size",
                f"expected at most the {len(self.labels)} training images, got {self.batch_size}; "
                "reduce it or add images",
            )


class Random(ImageSampler, name="random"):
    """Shuffled images; the usual choice for proxy losses. Each epoch drops the images that do not fill a batch.

    Raises:
        UserError: there are fewer images than the batch size.

    Example:
        >>> import torch
        >>> sampler = Random(torch.zeros(7), seed=0, batch_size=3)
        >>> [len(batch) for batch in sampler.batches(epoch=0)]
        [3, 3]
    """

    takes_several_labels = True

    def batches(self, epoch: int) -> list[list[int]]:
        order = self.generator(epoch).permutation(len(self.labels))
        return order[: len(self) * self.batch_size].reshape(len(self), self.batch_size).tolist()


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
        return np.searchsorted(self.cumulative, draws).clip(max=len(self.labels) - 1).tolist()
