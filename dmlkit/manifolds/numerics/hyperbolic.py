"""Code shared by both models of hyperbolic space: sign of the curvature, clipping, distance from sinh^2(d / 2)."""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

HyperbolicSimilarity = Literal["negative_distance", "negative_squared_distance", "origin_cosine"]


class SignedExponential(nn.Module):
    """A parametrization of a learnable curvature as sign * e^t: optimizer steps cannot change its sign or make it 0.

    Args:
        sign: +1 or -1.
    """

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


def check_hyperbolic(name: str, curvature: float, clip_distance: float | None) -> None:
    """Reject a curvature that is not hyperbolic and a clipping distance that maps every feature to the origin.

    Raises:
        ValueError: a value is out of range; the message names the option and the value.

    Example:
        >>> check_hyperbolic("Poincare", 1.0, None)
        Traceback (most recent call last):
        ...
        ValueError: Poincare: curvature must be negative, got 1.0 (hyperbolic space has K < 0)
    """
    if not -float("inf") < curvature < 0:
        raise ValueError(f"{name}: curvature must be negative, got {curvature} (hyperbolic space has K < 0)")
    if clip_distance is not None and not clip_distance > 0:
        raise ValueError(
            f"{name}: clip_distance must be positive, or null for no clipping, got {clip_distance}; "
            "a radius of 0 would map all features to the origin"
        )


def clip_features(features: Tensor, radius: float | None, border: Tensor) -> Tensor:
    """Shorten features (..., d) to the smaller of ``radius`` and ``border``; half precision becomes float32.

    Example:
        >>> clip_features(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0, torch.tensor(3.1))
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """
    features = features.float() if features.itemsize < 4 else features
    longest = border if radius is None else border.clamp(max=radius)
    return features * (longest / features.norm(dim=-1, keepdim=True).clamp(min=longest))


def farthest(dtype: torch.dtype) -> float:
    """Return the maximum distance of points from the origin, in units of 1 / sqrt(-K): 6.2 in float32.

    It corresponds to geoopt's border of the unit ball, length 1 - 4e-3, or 1 - 1e-5 in float64: 1 - |x|^2 has a
    relative error of 1e-5 there in float32.
    """
    return 2 * math.atanh(1 - (1e-5 if dtype == torch.float64 else 4e-3))


def strongest_curvature(radius: float) -> float:
    """The K < 0 of the strongest curvature with points in float32 at a distance of ``radius`` from the origin.

    Example:
        >>> round(strongest_curvature(2.0), 2)
        -9.65
    """
    return -((farthest(torch.float32) / radius) ** 2)


def right_angle_distance(curvature: Tensor, radius: float) -> Tensor:
    r"""Compute the distance u of two points at distance r from the origin, in perpendicular directions.

    .. math:: \cosh(\sqrt{-K}\, u) = \cosh^2(\sqrt{-K}\, r), \quad
            \sinh^2(\tfrac{\sqrt{-K}}{2} u) = \tfrac12 \sinh^2(\sqrt{-K}\, r)

    The second form does not cancel for K near 0, where u becomes sqrt(2) r.

    Args:
        curvature: K < 0, a scalar.
        radius: r > 0.

    Example:
        >>> [round(right_angle_distance(torch.tensor(k), 1.0).item(), 4) for k in (-1e-6, -1.0, -100.0)]
        [1.4142, 1.5134, 1.9307]
    """
    side = radius * (-curvature).double().sqrt().clamp(max=300 / radius)  # keeps sinh^2 finite: points end at 6
    return distance_from_sinh(side.sinh().square() / 2, curvature.double()).to(curvature.dtype)


def distance_from_sinh(sinh_squared: Tensor, curvature: Tensor) -> Tensor:
    """Compute d from sinh^2(d sqrt(-K) / 2), stable near 0 and for large values.

    Example:
        >>> distance_from_sinh(torch.tensor([0.0, 2.0]).mul(0.5).sinh().square(), torch.tensor(-1.0)).tolist()
        [0.0, 2.0]
    """
    # asinh is not evaluated at 0, where the gradient of the square root is infinite.
    positive = sinh_squared > torch.finfo(sinh_squared.dtype).tiny
    arc = 2 * torch.where(positive, sinh_squared, 1).sqrt().asinh() * positive
    return arc / (-curvature).sqrt()
