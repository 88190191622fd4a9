"""The head interface: a map from the backbone's features to points on the manifold."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from dmlkit.component import Component, ComponentConfig, option
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.numerics.autocast import without_autocast


class HeadConfig(ComponentConfig, frozen=True):
    """Base class of all head configs."""

    @abstractmethod
    def build(self, num_features: int, manifold: Manifold) -> "Head":
        """Build the head that maps ``num_features`` features to points on ``manifold``."""


class Head(Component, nn.Module, ABC, family=HeadConfig):
    """Base class of heads, which map features (B, F) to points (B, D) on the manifold.

    A head has two steps: `project` may run in half precision, and `to_points` always runs in at least float32,
    because a unit vector in bfloat16 is off by 4e-3.
    """

    num_features: int = option(kw_only=False)
    """F, width of the backbone's features h."""
    manifold: Manifold = option(kw_only=False)
    """The manifold of the points; its ``dim`` is the number of outputs."""

    def forward(self, features: Tensor) -> Tensor:
        """Map features (B, F) to points (B, D)."""
        projected = self.project(features)
        with without_autocast(features):
            return self.to_points(projected.float() if projected.itemsize < 4 else projected)

    @abstractmethod
    def project(self, features: Tensor) -> Tensor:
        """Apply the step that may run in half precision: (B, F) -> (B, F')."""

    def to_points(self, projected: Tensor) -> Tensor:
        """Apply the step that runs in full precision: (B, F') -> (B, D)."""
        return self.manifold.from_features(projected)
