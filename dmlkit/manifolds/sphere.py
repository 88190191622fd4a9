"""The unit sphere: embeddings compared by direction."""

import math
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.linalg import vecdot
from torch.nn.functional import normalize

from dmlkit.component import option
from dmlkit.manifolds.base import TOLERANCE, Manifold, Side, load_geoopt
from dmlkit.manifolds.products import inner_products, rounding_error, safe_sqrt, unit_vectors


class Sphere(Manifold, name="sphere"):
    """Unit vectors; the usual choice for proxy losses.

    Similarities: ``cosine`` <x, y>, ``negative_distance``, ``negative_squared_distance``.
    Distances: ``chord`` |x - y| = sqrt(2 - 2 <x, y>) or ``arc`` 2 asin(|x - y| / 2), the geodesic one.

    Example:
        >>> sphere = Sphere(2, metric="arc")
        >>> points = sphere.from_features(torch.tensor([[3., 0.], [0., 5.]]))
        >>> sphere.similarity(points, points).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
        >>> round(sphere.distance(points, points)[0, 1].item(), 4)  # a quarter of a turn
        1.5708
    """

    similarity_name: Literal["cosine", "negative_distance", "negative_squared_distance"] = option(
        default="cosine", alias="similarity"
    )
    """Similarity that orders neighbors and that losses use."""
    metric: Literal["chord", "arc"] = "chord"
    """``chord`` is |x - y|, the usual distance of unit vectors in metric learning; ``arc`` is the angle."""

    takes_stacks = True
    longest = 1 + TOLERANCE

    @cached_property
    def geometry(self) -> Any:
        return load_geoopt().Sphere()

    def from_features(self, features: Tensor) -> Tensor:
        """Compute x / |x|. A zero vector stays zero; below |x| = 1e-6 the gradient is that of x / 1e-6."""
        return unit_vectors(features)

    def distance_off(self, points: Tensor) -> Tensor:
        return (torch.linalg.vector_norm(points, dim=-1) - 1).abs()

    def describe_off(self, point: Tensor) -> str:
        length = float(point.double().norm())
        return f"its length is {length:.4g}, where points of the sphere have length 1"

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        squared = 2 - 2 * inner_products(x, None if x is y else y)  # (N, M)
        chord = safe_sqrt(squared.masked_fill(squared < 2 * rounding_error(x), 0))
        return self._from_chord(chord)

    def paired_distance(self, x: Tensor, y: Tensor) -> Tensor:
        difference = normalize(x.double(), dim=-1) - normalize(y.double(), dim=-1)
        return self._from_chord(safe_sqrt(vecdot(difference, difference))).to(x.dtype)

    def unrelated_distance(self) -> float:
        return 2**0.5 if self.metric == "chord" else math.pi / 2

    def karcher_mean(self, points: Tensor) -> Tensor:
        """Return the mean direction for the chord, whose squares are 2 - 2 <x, y>."""
        return self.from_features(points.mean(0)) if self.metric == "chord" else super().karcher_mean(points)

    def product_vectors(self, points: Tensor) -> Tensor:
        return points

    def distance_vectors(self, points: Tensor, side: Side) -> Tensor:
        """Return the unit vectors: both distances decrease with the cosine."""
        return normalize(points.double(), dim=-1).to(points.dtype)

    def index_form(self) -> dict[str, Any]:
        return {"form": "as_is"}

    def _from_chord(self, chord: Tensor) -> Tensor:
        # asin of half the chord keeps small angles (acos gives d(x, x) = 0.014 in float32); its gradient is
        # infinite at 1, between antipodes, so half the chord is limited to 1 minus 1 / 10 000 (float32).
        limit = 1 - torch.finfo(chord.dtype).eps ** 0.5
        return chord if self.metric == "chord" else 2 * torch.asin((chord / 2).clamp(max=limit))
