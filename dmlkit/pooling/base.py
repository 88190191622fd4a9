"""The pooling interface: from feature maps to one vector."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from dmlkit.component import ComponentConfig


class PoolingConfig(ComponentConfig, frozen=True):
    """Root of the pooling family."""

    def build(self) -> "Pooling":
        """Return the pooling layer."""
        raise NotImplementedError


class Pooling(nn.Module, ABC):
    """A layer from feature maps (B, C, H, W) to vectors (B, C)."""

    @abstractmethod
    def forward(self, maps: Tensor, token: Tensor | None = None) -> Tensor:
        """Pool maps (B, C, H, W) to vectors (B, C); a transformer also passes its class token (B, C)."""
