"""The hyperboloid (Lorentz model): hyperbolic space as a sheet in Minkowski space."""

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


class Lorentz(Hyperbolic, name="lorentz"):
    r"""Hyperbolic space as a hyperboloid; the same geometry as the ball, with one more coordinate.

    The sheet :math:`-x_0^2 + |\bar x|^2 = 1/K`, x_0 > 0, in R^{d+1}, with constant sectional curvature K < 0.

    .. math:: \cosh(\sqrt{-K}\, d(x, y)) = K \langle x, y \rangle_L = -K (x_0 y_0 - \bar x \cdot \bar y)

    Features are tangent vectors at the origin: :math:`\exp_0(v)` has
    :math:`\bar x = \sinh(\sqrt{-K}|v|)\, v / (\sqrt{-K}|v|)`. A feature of length r lands at distance r;
    distances tend to |x - y| as K tends to 0.

    x_0 follows from the other coordinates. Distances compute it from them, so that neither rounding nor a learned K
    can move points off the sheet.

    Similarities: ``negative_distance`` -d, ``negative_squared_distance`` -d^2, ``origin_cosine`` the cosine of
    the log maps at the origin (Zhang et al., CVPR 2022, section 3.3).

    Example:
        >>> sheet = Lorentz(2, curvature=-1.0)
        >>> points = sheet.from_features(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
        >>> points[0]
        tensor([1., 0., 0.])
        >>> round(sheet.distance(points, points)[0, 1].item(), 4)
        1.0
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.point_dim = self.dim + 1
        load_geoopt()  # Sheet derives from its hyperboloid
        from dmlkit.manifolds._sheet import Sheet

        self.geometry = Sheet(k=-1 / self.initial_curvature)
        if self.learnable_curvature:
            make_learnable(self.geometry, sign=1)

    @property
    def curvature(self) -> Tensor:
        return -1 / self.geometry.k

    def from_features(self, features: Tensor) -> Tensor:
        root = (-self.curvature).sqrt()
        features = clip_features(features, self.clip_distance, farthest(features.dtype) / root)
        length = features.norm(dim=-1, keepdim=True).clamp(min=1e-15) * root
        return self._complete(features * (length.sinh() / length))

    def to_features(self, points: Tensor) -> Tensor:
        space = points[..., 1:]
        length = space.norm(dim=-1, keepdim=True).clamp(min=1e-15) * (-self.curvature).sqrt()
        return space * (length.asinh() / length)

    def translate(self, points: Tensor, features: Tensor) -> Tensor:
        r"""Move points (..., D) along tangent vectors at the origin ``features`` (..., d), transported to the points.

        .. math:: \exp_x(PT_{o \to x}(b)), \quad PT_{o \to x}(b) = b + \frac{\bar x \cdot b}{r (r + x_0)} (o + x), \quad
                r = 1 / \sqrt{-K}

        A b longer than `farthest` is shortened to it. Points beyond the range of the dtype are moved back to it.
        """
        radius, space, border = (-self.curvature).rsqrt(), points[..., 1:], farthest(points.dtype)
        features = clip_features(features, None, border * radius)
        time = radius + self._height(space.square().sum(-1, keepdim=True))
        along = (space * features).sum(-1, keepdim=True) / (radius * (radius + time))
        length = (features.norm(dim=-1, keepdim=True) / radius).clamp(min=1e-15)
        moved = length.cosh() * space + length.sinh() / length * (features + along * space)
        return self._complete(clip_features(moved, None, radius * math.sinh(border)))

    def distance_off(self, points: Tensor) -> Tensor:
        r"""|x_0 - t| / t with t = \sqrt{|\bar x|^2 - 1/K}.

        <x, x>_L - 1/K would cancel: in float32 it is off by 8e-3 at the end of the sheet, where x_0 is 246.
        """
        time = self._time(points)
        return (points[..., 0] - time).abs() / time

    def describe_off(self, point: Tensor) -> str:
        time = float(self._time(point.double()))
        return f"its x_0 is {float(point[0]):.4g}, where the point of the hyperboloid has {time:.4g}"

    def proxy_points(self, proxies: Tensor) -> Tensor:
        """Return the points of the proxies; if K is learned, the sheet may have moved, so x_0 is recomputed."""
        return self._complete(proxies[..., 1:]) if self.proxies == "points" else self.from_features(proxies)

    def paired_distance(self, x: Tensor, y: Tensor) -> Tensor:
        x64, y64, curvature = x[..., 1:].double(), y[..., 1:].double(), self.curvature.double()
        difference, rise = x64 - y64, self._height(squared_norms(x64)) - self._height(squared_norms(y64))
        sinh_squared = (squared_norms(difference) - rise.square()).clamp(min=0) * (-curvature / 4)
        return distance_from_sinh(sinh_squared, curvature).to(x.dtype)

    def product_vectors(self, points: Tensor) -> Tensor:
        return unit_vectors(points[..., 1:])

    def distance_vectors(self, points: Tensor, side: Side) -> Tensor:
        """Return lifted vectors: <(-x_0, x), (y_0 - 1 / sqrt(-K), y)> = <x, y>_L + x_0 / sqrt(-K).

        The shift of y_0 is the same for all gallery points. It keeps the order and avoids the cancellation of
        x_0 y_0 and x.y near the origin and for K near 0, where the product becomes (|x|^2 - |x - y|^2) / 2.
        """
        space = points[:, 1:].double()
        height = self._height(space.square().sum(-1, keepdim=True))
        time = -height - 1 / (-self.curvature.double()).sqrt() if side == "query" else height
        return torch.cat([time, space], dim=-1).to(points.dtype)

    def _rows(self, points: Tensor) -> PointRows:
        squared = vecdot(points[:, 1:], points[:, 1:])[:, None]
        factor = (-self.curvature).sqrt() / 2
        return PointRows(points[:, 1:], squared, factor.expand_as(squared), self._height(squared))

    def index_form(self) -> dict[str, Any]:
        if self.similarity_name == "origin_cosine":
            return {"form": "unit_space"}
        return {"form": "lorentz_lift", "curvature": self.curvature.item()}

    def _complete(self, space: Tensor) -> Tensor:
        """Return the points (..., d + 1) with the space coordinates ``space`` (..., d)."""
        height = self._height(space.square().sum(-1, keepdim=True))
        return torch.cat([height + (-self.curvature).rsqrt(), space], dim=-1)

    def _time(self, points: Tensor) -> Tensor:
        """Compute x_0 (...) from the other coordinates of points (..., d + 1)."""
        return (squared_norms(points[..., 1:]) - 1 / float(self.curvature)).sqrt()

    def _height(self, squared: Tensor) -> Tensor:
        """Compute x_0 - 1 / sqrt(-K), the height above the origin, from |x|^2, without cancellation."""
        radius_squared = -1 / self.curvature.to(squared.dtype)
        return squared / ((radius_squared + squared).sqrt() + radius_squared.sqrt())
