"""Average plus maximum pooling."""

from typing import Literal

from torch import Tensor

from dmlkit.pooling.base import Pooling, PoolingConfig


class AvgMaxConfig(PoolingConfig, frozen=True):
    """Mean plus maximum, used for the published Proxy-Anchor results; adds about 1 % to R@1 on CUB and Cars."""

    name: Literal["avg_max"] = "avg_max"

    def build(self) -> "AvgMax":
        return AvgMax()


class AvgMax(Pooling):
    """The sum of global average pooling and global maximum pooling.

    Example:
        >>> import torch
        >>> AvgMax()(torch.tensor([[[[1.0, 2.0], [3.0, 6.0]]]]))
        tensor([[9.]])
    """

    def forward(self, maps: Tensor, token: Tensor | None = None) -> Tensor:
        return maps.mean((2, 3)) + maps.amax((2, 3))
