"""Similarities that look at more than points: at coordinates of their images that are behind those of the points."""

from typing import Literal

from torch import Tensor

from dmlkit.manifolds.base import Manifold, Side


class ScoredSpace(Manifold):
    """Geometry of points followed by other coordinates of their images: there is a similarity, and nothing else.

    Args:
        space: geometry of the points.
        width: number of the other coordinates.
        what: what they are.
    """

    def __init__(self, space: Manifold, width: int, what: Literal["place", "matches"]) -> None:
        super().__init__(space.dim)
        self.space, self.width, self.what = space, width, what
        self.point_dim, self.similarity_name = space.point_dim + width, f"{space.similarity_name}_and_{what}"

    def distance_off(self, points: Tensor) -> Tensor:
        """Return how far the points are from their manifold."""
        return self.space.distance_off(points[..., : -self.width])

    def _refused(self) -> NotImplementedError:
        return NotImplementedError(f"points with {self.what} have a similarity alone; compare them without {self.what}")

    def from_features(self, features: Tensor) -> Tensor:
        """Raise an error: there is a similarity alone."""
        raise self._refused()

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Raise an error: there is a similarity alone."""
        raise self._refused()

    def paired_distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Raise an error: there is a similarity alone."""
        raise self._refused()

    def product_vectors(self, points: Tensor) -> Tensor:
        """Raise an error: there is a similarity alone."""
        raise self._refused()

    def distance_vectors(self, points: Tensor, side: Side) -> Tensor:
        """Raise an error: there is a similarity alone."""
        raise self._refused()
