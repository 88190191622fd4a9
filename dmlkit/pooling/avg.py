"""Average pooling."""

from typing import Literal

from torch import Tensor

from dmlkit.pooling.base import Pooling, PoolingConfig


class AvgConfig(PoolingConfig, frozen=True):
    """The mean over all positions."""

    name: Literal["avg"] = "avg"

    def build(self) -> "Avg":
        return Avg()


class Avg(Pooling):
    """Global average pooling.

    Example:
        >>> import torch
        >>> Avg()(torch.tensor([[[[1.0, 2.0], [3.0, 6.0]]]]))
        tensor([[3.]])
    """

    def forward(self, maps: Tensor, token: Tensor | None = None) -> Tensor:
        return maps.mean((2, 3))
