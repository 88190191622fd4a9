"""Hyperbolic space: what its two models have in common, and arithmetic that keeps its digits near poles."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NegativeFloat, PositiveFloat
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

from dmlkit.component import option
from dmlkit.manifolds.base import UNRELATED_RADIUS, Manifold
from dmlkit.manifolds.products import rounding_error


class SignedExponential(nn.Module):
    """A parametrization of a learnable curvature as sign * e^t: optimizer steps cannot change its sign or make it 0."""

    def __init__(self, sign: int) -> None:
        super().__init__()
        self.sign = sign

    def forward(self, exponent: Tensor) -> Tensor:
        return self.sign * exponent.exp()

    def right_inverse(self, value: Tensor) -> Tensor:
        return (self.sign * value).log()


def make_learnable(geometry: nn.Module, sign: int) -> None:
    """Make the curvature ``geometry.k`` of a geoopt manifold learnable, with a fixed sign."""
    geometry.k.requires_grad_(True)
    register_parametrization(geometry, "k", SignedExponential(sign))


def farthest(dtype: torch.dtype) -> float:
    """Return the maximum distance of points from the origin, in units of 1 / sqrt(-K): 6.2 in float32.

    It corresponds to geoopt's border of the unit ball, length 1 - 4e-3, or 1 - 1e-5 in float64: 1 - |x|^2 has a
    relative error of 1e-5 there in float32.
    """
    return 2 * math.atanh(1 - (1e-5 if dtype == torch.float64 else 4e-3))


STRONGEST_CURVATURE = -((farthest(torch.float32) / UNRELATED_RADIUS) ** 2)
"""Strongest curvature K < 0 with points in float32 at a distance of `UNRELATED_RADIUS` from the origin."""


def distance_from_sinh(sinh_squared: Tensor, curvature: Tensor) -> Tensor:
    """Compute d from sinh^2(d sqrt(-K) / 2), stable near 0 and for large values."""
    # asinh is not evaluated at 0, where the gradient of the square root is infinite.
    positive = sinh_squared > torch.finfo(sinh_squared.dtype).tiny
    arc = 2 * torch.where(positive, sinh_squared, 1).sqrt().asinh() * positive
    return arc / (-curvature).sqrt()


@dataclass(frozen=True)
class PointRows:
    """The inputs of `product_distance` for one set of points; each is (N, 1) except the coordinates."""

    coordinates: Tensor  # u (N, d)
    squared: Tensor  # |u|^2
    factor: Tensor  # p, the factor of these points in the scale of sinh^2
    height: Tensor | None = None  # h, their height above the tangent plane at the origin


def squared_norms(x: Tensor) -> Tensor:
    """Compute |x|^2 of points x (..., D): (...), in one pass; a sum of products takes two and writes a temporary."""
    return torch.linalg.vector_norm(x, dim=-1).square()


def product_distance(x: PointRows, y: PointRows, curvature: Tensor) -> Tensor:
    r"""Compute d_ij (N, M) with one product of (N, d) and (d, M), without an (N, M, d) tensor.

    .. math:: \sinh^2(\tfrac{\sqrt{-K}}{2} d_{ij}) = p_i p_j (|x_i|^2 + |y_j|^2 - 2 x_i \cdot y_j - (h_i - h_j)^2)

    If the bracket is below its own rounding error, d is 0 with a zero gradient.
    """
    apply: Any = _ProductDistance.apply
    rows = (x.coordinates, x.squared, x.factor, x.height)
    columns = (y.coordinates, y.squared.T, y.factor.T, None if y.height is None else y.height.T)
    return apply(*rows, *columns, (-curvature).rsqrt())


class _ProductDistance(torch.autograd.Function):
    """Hyperbolic distances; autograd would take 1.9 times the two products needed, half of it for temporaries."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Tensor:
        # of x: coordinates (N, d), |x|^2, factor and height (N, 1); of y the same, transposed; radius is 1 / sqrt(-K)
        x, x_squared, x_factor, x_height, y, y_squared, y_factor, y_height, radius = tensors
        scale = x_squared + y_squared  # (N, M)
        s = torch.addmm(scale, x, y.T, alpha=-2)
        if x_height is not None and y_height is not None:
            rise = x_height - y_height
            s.addcmul_(rise, rise, value=-1)
        s.masked_fill_(s < scale.mul_(rounding_error(s)), 0).mul_(x_factor).mul_(y_factor)
        ctx.save_for_backward(s, x, x_factor, x_height, y, y_factor, y_height, radius)
        # 2 asinh(sqrt(s)) as log1p(2 (s + sqrt(s + s^2))): torch.asinh takes 14 times as long on a CPU.
        arc = torch.mul(s, s, out=scale).add_(s).sqrt_().add_(s).mul_(2).log1p_()
        return arc.mul_(radius)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        s, x, x_factor, x_height, y, y_factor, y_height, radius = ctx.saved_tensors
        slope = s.square().add_(s)
        slope.masked_fill_(slope <= torch.finfo(s.dtype).tiny, torch.inf).rsqrt_().mul_(grad)  # radius * d/ds
        share = slope * s
        by_x_factor = share.sum(1, keepdim=True) * radius / x_factor
        by_y_factor = share.sum(0, keepdim=True) * radius / y_factor
        by_radius = None
        if ctx.needs_input_grad[8]:
            by_radius = (grad * torch.mul(s, s, out=share).add_(s).sqrt_().add_(s).mul_(2).log1p_()).sum()
        bracket = slope.mul_(x_factor * radius).mul_(y_factor)  # (N, M) the gradient of the bracket
        by_x_squared, by_y_squared = bracket.sum(1, keepdim=True), bracket.sum(0, keepdim=True)
        by_x_height = by_y_height = None
        if x_height is not None:
            by_x_height = 2 * (bracket @ y_height.T - x_height * by_x_squared)
            by_y_height = 2 * (x_height.T @ bracket - y_height * by_y_squared)
        by_x, by_y = (bracket @ y).mul_(-2), (bracket.T @ x).mul_(-2)
        return by_x, by_x_squared, by_x_factor, by_x_height, by_y, by_y_squared, by_y_factor, by_y_height, by_radius


class Hyperbolic(Manifold):
    """Space of constant sectional curvature K < 0, whose features are tangent vectors at the origin."""

    is_hyperbolic: ClassVar[bool] = True
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
        r"""Return the distance u of two points at distance r, `UNRELATED_RADIUS`, in perpendicular directions.

        .. math:: \cosh(\sqrt{-K}\, u) = \cosh^2(\sqrt{-K}\, r), \quad
                \sinh^2(\tfrac{\sqrt{-K}}{2} u) = \tfrac12 \sinh^2(\sqrt{-K}\, r)

        The second form does not cancel for K near 0, where u becomes sqrt(2) r.
        """
        curvature, r = self.curvature, UNRELATED_RADIUS
        side = r * (-curvature).double().sqrt().clamp(max=300 / r)  # keeps sinh^2 finite: points end at 6
        return distance_from_sinh(side.sinh().square() / 2, curvature.double()).to(curvature.dtype)

    def learned_options(self) -> dict[str, Any]:
        return {"curvature": self.curvature.item()} if is_parametrized(self.geometry) else {}
