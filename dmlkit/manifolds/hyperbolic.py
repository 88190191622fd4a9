"""Hyperbolic space: what its two models, the hyperboloid and the ball, have in common."""

from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import Field, NegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from dmlkit.component import option
from dmlkit.manifolds.base import UNRELATED_RADIUS, Manifold
from dmlkit.manifolds.numerics.hyperbolic import PointRows, product_distance, right_angle_distance


class Hyperbolic(Manifold):
    """Space of constant sectional curvature K < 0, whose features are tangent vectors at the origin."""

    initial_curvature: Annotated[NegativeFloat, Field(allow_inf_nan=False)] = option(default=-1.0, alias="curvature")
    """K < 0, the sectional curvature."""
    learnable_curvature: bool = False
    """Train K together with the head."""
    clip_distance: PositiveFloat | None = 2.3
    """Maximum length of features, and so maximum distance of points from the origin; null does not clip."""
    similarity_name: Literal["negative_distance", "negative_squared_distance", "origin_cosine"] = option(
        default="negative_distance", alias="similarity"
    )
    """Similarity that orders neighbors and that losses use."""

    @property
    @abstractmethod
    def curvature(self) -> Tensor:
        """K, a scalar tensor below 0."""

    @abstractmethod
    def _rows(self, points: Tensor) -> PointRows:
        """Return the inputs of `product_distance` for points (N, D)."""

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        return product_distance(self._rows(x), self._rows(y), self.curvature)

    def unrelated_distance(self) -> Tensor:
        return right_angle_distance(self.curvature, UNRELATED_RADIUS)

    def learned_options(self) -> dict[str, Any]:
        return {"curvature": self.curvature.item()} if is_parametrized(self.geometry) else {}
