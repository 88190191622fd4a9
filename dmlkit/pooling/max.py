"""Maximum pooling."""

from typing import Literal

from torch import Tensor

from dmlkit.pooling.base import Pooling, PoolingConfig


class MaxConfig(PoolingConfig, frozen=True):
    """The maximum over all positions."""

    name: Literal["max"] = "max"

    def build(self) -> "Max":
        return Max()


class Max(Pooling):
    """Global maximum pooling.

    Example:
        >>> import torch
        >>> Max()(torch.tensor([[[[1.0, 2.0], [3.0, 6.0]]]]))
        tensor([[6.]])
    """

    def forward(self, maps: Tensor, token: Tensor | None = None) -> Tensor:
        return maps.amax((2, 3))
