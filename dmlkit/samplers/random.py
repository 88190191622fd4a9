"""Random batches: every image at most once per epoch."""

from typing import Literal

from pydantic import PositiveInt
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.samplers.base import ALL_PAIRS, Sampler, SamplerConfig, pairs_among


class RandomConfig(SamplerConfig, frozen=True):
    """Shuffled images; the usual choice for proxy losses. Each epoch drops the images that do not fill a batch."""

    name: Literal["random"] = "random"
    batch_size: PositiveInt = 32
    """Number of images in a batch, over all ranks."""

    @property
    def pairs(self) -> str:
        return pairs_among(1, 1) if self.batch_size == 1 else ALL_PAIRS

    def build(
        self, labels: Tensor, seed: int, super_classes: Tensor | None = None, groups: Tensor | None = None
    ) -> "Random":
        return Random(labels, seed, batch_size=self.batch_size)


class Random(Sampler):
    """A new permutation every epoch, cut into full batches.

    Args:
        labels: (N,); only the length is used.
        seed: see `Sampler`.
        batch_size: number of images in a batch.

    Raises:
        UserError: there are fewer images than the batch size.

    Example:
        >>> import torch
        >>> sampler = Random(torch.zeros(7), seed=0, batch_size=3)
        >>> [len(batch) for batch in sampler.batches(epoch=0)]
        [3, 3]
    """

    def __init__(self, labels: Tensor, seed: int, *, batch_size: int = 32) -> None:
        super().__init__(seed)
        if len(labels) < batch_size:
            raise UserError(
                f"sampler.batch_size: expected at most the {len(labels)} training images, got {batch_size}; "
                "reduce it or add images"
            )
        self.batch_size = batch_size
        self.num_images = len(labels)

    def __len__(self) -> int:
        return self.num_images // self.batch_size

    def batches(self, epoch: int) -> list[list[int]]:
        order = self.generator(epoch).permutation(self.num_images)
        return order[: len(self) * self.batch_size].reshape(len(self), self.batch_size).tolist()
