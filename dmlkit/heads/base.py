"""The head interface: from the backbone's features to points on the manifold."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from dmlkit.component import ComponentConfig
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.numerics.autocast import without_autocast


class HeadConfig(ComponentConfig, frozen=True):
    """Root of the head family."""

    @abstractmethod
    def build(self, num_features: int, manifold: Manifold) -> "Head":
        """The head from ``num_features`` features to points on ``manifold``."""


class Head(nn.Module, ABC):
    """Features (B, F) to points (B, D) on the manifold.

    A member splits the way in two: `project` may run in half precision, `to_points` always runs in at least
    float32, because a unit vector in bfloat16 is off by 4e-3.
    """

    def __init__(self, manifold: Manifold) -> None:
        super().__init__()
        self.manifold = manifold

    def forward(self, features: Tensor) -> Tensor:
        """Points (B, D) of features (B, F)."""
        projected = self.project(features)
        with without_autocast(features):
            return self.to_points(projected.float() if projected.itemsize < 4 else projected)

    @abstractmethod
    def project(self, features: Tensor) -> Tensor:
        """What may run in half precision: (B, F) -> (B, F')."""

    def to_points(self, projected: Tensor) -> Tensor:
        """What runs in full precision: (B, F') -> (B, D)."""
        return self.manifold.from_features(projected)
