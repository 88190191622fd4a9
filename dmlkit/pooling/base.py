"""The pooling interface: a map of features to one vector."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from dmlkit.component import ComponentConfig


class PoolingConfig(ComponentConfig, frozen=True):
    """Root of the pooling family."""

    def build(self) -> "Pooling":
        """The pooling layer."""
        raise NotImplementedError


class Pooling(nn.Module, ABC):
    """Feature maps (B, C, H, W) to vectors (B, C)."""

    @abstractmethod
    def forward(self, maps: Tensor, token: Tensor | None = None) -> Tensor:
        """Vectors (B, C) of maps (B, C, H, W); a transformer also gives its class token (B, C)."""
