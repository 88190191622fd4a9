"""The Poincaré ball: hyperbolic space as the inside of a ball."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vecdot

from dmlkit.manifolds.base import Side, load_geoopt
from dmlkit.manifolds.hyperbolic import (
    Hyperbolic,
    PointRows,
    distance_from_sinh,
    farthest,
    make_learnable,
    squared_norms,
)
from dmlkit.manifolds.products import clip_features, unit_vectors


class Poincare(Hyperbolic, name="poincare"):
    r"""Hyperbolic space as a ball; volume grows exponentially towards its boundary, as in a tree.

    The ball :math:`-K|x|^2 < 1` in R^d with constant sectional curvature K < 0.

    .. math:: d(x, y) = \frac{2}{\sqrt{-K}} \operatorname{asinh}
            \sqrt{\frac{-K |x - y|^2}{(1 + K|x|^2)(1 + K|y|^2)}}

    Features are tangent vectors at the origin, :math:`\exp_0(v) = \tanh(\sqrt{-K}|v|/2)\, v / (\sqrt{-K}|v|)`. A
    feature of length r lands at distance r, as on the hyperboloid: the same features give the same points in both.
    Ganea et al. (NeurIPS 2018, lemma 2), geoopt and Ermolov et al. write the tangent vector in coordinates of the
    ball, whose metric at the origin is 4 times the Euclidean one: their v is half of this v and lands at distance
    2|v|, and the radius 2.3 at which Ermolov et al. (CVPR 2022) clip is 4.6 here. Clipping (Guo et al., CVPR 2022)
    keeps points off the boundary, where gradients vanish.

    Similarities: ``negative_distance`` -d, ``negative_squared_distance`` -d^2, ``origin_cosine`` the cosine of
    the log maps at the origin (Zhang et al., CVPR 2022, section 3.3). A log map at the origin keeps the
    direction, so this is also the cosine of the coordinates. A dot product of coordinates has no geometric meaning.

    Example:
        >>> ball = Poincare(2, curvature=-1.0)
        >>> points = ball.from_features(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
        >>> ball.distance(points, points)
        tensor([[0., 1.],
                [1., 0.]])
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        # Stereographic stores K itself; PoincareBall stores log(e^c - 1), which is -inf for c < 6e-8 in float32.
        self.geometry = load_geoopt().Stereographic(k=self.initial_curvature)
        if self.learnable_curvature:
            make_learnable(self.geometry, sign=-1)

    @property
    def curvature(self) -> Tensor:
        return self.geometry.k

    def from_features(self, features: Tensor) -> Tensor:
        return self._exponential(features, self.clip_distance)

    def to_features(self, points: Tensor) -> Tensor:
        length = points.norm(dim=-1, keepdim=True).clamp(min=1e-15) * (-self.curvature).sqrt()
        return points * (2 * length.atanh() / length)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        r"""Compute the Möbius sum of points (..., d), moved back inside the ball (Ganea et al. 2018, eq. 3, c = -K).

        .. math:: x \oplus y = \frac{(1 + 2c\,x \cdot y + c|y|^2) x + (1 - c|x|^2) y}{1 + 2c\,x \cdot y + c^2|x|^2|y|^2}
        """
        c = -self.curvature
        x_squared, y_squared = x.square().sum(-1, keepdim=True), y.square().sum(-1, keepdim=True)
        twice = 1 + 2 * c * (x * y).sum(-1, keepdim=True)
        total = ((twice + c * y_squared) * x + (1 - c * x_squared) * y) / (twice + c.square() * x_squared * y_squared)
        longest = math.tanh(farthest(total.dtype) / 2) * c.rsqrt()
        return clip_features(total, None, longest)

    def translate(self, points: Tensor, features: Tensor) -> Tensor:
        r"""Move points (..., d) along the tangent vector at the origin ``features`` (..., d), transported to each.

        .. math:: \exp_x(PT_{o \to x}(b)) = x \oplus \exp_0(b)

        (Ganea et al. 2018, section 3.2.) It is `Lorentz.translate` on the ball, and cuts b at the same length.
        """
        return self.add(points, self._exponential(features, None))

    def _exponential(self, features: Tensor, radius: float | None) -> Tensor:
        """Compute exp_0 of features, shortened to ``radius`` and to the inside of the ball."""
        root = (-self.curvature).sqrt()
        features = clip_features(features, radius, farthest(features.dtype) / root)
        length = features.norm(dim=-1, keepdim=True).clamp(min=1e-15) * root
        return features * ((length / 2).tanh() / length)  # geoopt's scripted map cannot be exported

    def distance_off(self, points: Tensor) -> Tensor:
        """Return 0 inside the ball, and |x| in radii outside, where no distance is defined."""
        root = (-float(self.curvature)) ** 0.5
        length = torch.linalg.vector_norm(points, dim=-1) * root
        near_border = length > 0.9999  # where float32 may be wrong; all in float64 would take 10 times as long
        length[near_border] = (torch.linalg.vector_norm(points[near_border].double(), dim=-1) * root).to(length.dtype)
        return length * (length >= 1)

    def describe_off(self, point: Tensor) -> str:
        length, radius = float(point.double().norm()), (-float(self.curvature)) ** -0.5
        return f"its length is {length:.8g}, where points of the ball are shorter than its radius of {radius:.8g}"

    def proxy_points(self, proxies: Tensor) -> Tensor:
        """Return the points of the proxies; points outside the ball, which shrinks if K is learned, move inside."""
        return self.geometry.projx(proxies) if self.proxies == "points" else self.from_features(proxies)

    def paired_distance(self, x: Tensor, y: Tensor) -> Tensor:
        x64, y64, curvature = x.double(), y.double(), self.curvature.double()
        shrink = (1 + curvature * squared_norms(x64)) * (1 + curvature * squared_norms(y64))
        difference = x64 - y64
        return distance_from_sinh(-curvature * squared_norms(difference) / shrink, curvature).to(x.dtype)

    def product_vectors(self, points: Tensor) -> Tensor:
        return unit_vectors(points)

    def distance_vectors(self, points: Tensor, side: Side) -> Tensor:
        """Return the lift to the hyperboloid; see `Lorentz.distance_vectors`."""
        x, curvature = points.double(), self.curvature.double()
        squared = x.square().sum(-1, keepdim=True)
        shrink = 1 + curvature * squared
        if side == "query":
            time = -(1 - curvature * squared) / (shrink * (-curvature).sqrt())
        else:
            time = 2 * (-curvature).sqrt() * squared / shrink
        return torch.cat([time, 2 * x / shrink], dim=-1).to(points.dtype)

    def index_form(self) -> dict[str, Any]:
        if self.similarity_name == "origin_cosine":
            return {"form": "unit"}
        return {"form": "poincare_lift", "curvature": self.curvature.item()}

    def _rows(self, points: Tensor) -> PointRows:
        squared = vecdot(points, points)[:, None]
        return PointRows(points, squared, (-self.curvature).sqrt() / (1 + self.curvature * squared))
