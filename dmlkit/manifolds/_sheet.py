"""The hyperboloid for Riemannian optimizers: geoopt's, made stable in float32."""

import math
from typing import Any

import torch
from geoopt.manifolds import Lorentz as GeooptLorentz
from torch import Tensor

from dmlkit.manifolds.hyperbolic import farthest


class Sheet(GeooptLorentz):
    """geoopt's ``Lorentz`` (k = -1/K) with stable operations for float32 optimizer steps.

    geoopt's own operations give NaN after some hundred steps: the inner product of a tangent vector cancels to below 0,
    the transport divides by the squared length of the step, and points are not bounded. Here time coordinates
    are computed from the space coordinates, sums are in float64, and points stay within `farthest`.
    """

    def projx(self, x: Tensor, *, dim: int = -1) -> Tensor:
        space = x[..., 1:].double()
        limit = self.k.double().sqrt() * math.sinh(farthest(x.dtype))
        length = space.norm(dim=-1, keepdim=True).clamp(min=1e-15)
        return self._above(space * (limit / length).clamp(max=1)).to(x.dtype)

    def egrad2rgrad(self, x: Tensor, u: Tensor, *, dim: int = -1) -> Tensor:
        x64 = self._above(x[..., 1:].double())
        raised = torch.cat([-u[..., :1], u[..., 1:]], dim=-1).double()
        return (raised + minkowski(x64, raised) * x64 / self.k.double()).to(u.dtype)

    def inner(self, x: Tensor, u: Tensor, v: Tensor | None = None, *, keepdim: bool = False, dim: int = -1) -> Tensor:
        x64 = self._above(x[..., 1:].double())
        first = tangent(x64, u)
        product = minkowski(first, first if v is None else tangent(x64, v))
        return (product if keepdim else product.squeeze(-1)).to(u.dtype)

    def expmap(self, x: Tensor, u: Tensor, *, norm_tan: bool = True, project: bool = True, dim: int = -1) -> Tensor:
        x64 = self._above(x[..., 1:].double())
        direction = tangent(x64, u)
        root = self.k.double().sqrt()
        length = minkowski(direction, direction).clamp(min=1e-30).sqrt() / root
        # A step longer than the representable diameter also ends at its border.
        step = length.clamp(max=2 * farthest(x.dtype))
        return self.projx((step.cosh() * x64 + step.sinh() / length * direction).to(x.dtype))

    retr = expmap

    def transp(self, x: Tensor, y: Tensor, v: Tensor, *, dim: int = -1) -> Tensor:
        x64, y64 = self._above(x[..., 1:].double()), self._above(y[..., 1:].double())
        moved = tangent(x64, v)
        moved = moved + minkowski(y64, moved) / (self.k.double() - minkowski(x64, y64)) * (x64 + y64)
        return moved.to(v.dtype)

    def _above(self, space: Tensor) -> Tensor:
        time = (self.k.to(space.dtype) + space.square().sum(-1, keepdim=True)).sqrt()
        return torch.cat([time, space], dim=-1)

    def _check_point_on_manifold(
        self, x: Tensor, *, atol: float = 1e-5, rtol: float = 1e-5, dim: int = -1
    ) -> tuple[bool, str | None]:
        """Return whether x_0 agrees with the other coordinates, relative to its size, as rounding errors are."""
        expected: Any = self._above(x[..., 1:])[..., 0]
        if torch.allclose(x[..., 0], expected, atol=atol, rtol=rtol):
            return True, None
        return False, "x_0 is not sqrt(k + |x|^2)"


def minkowski(u: Tensor, v: Tensor) -> Tensor:
    """Compute <u, v>_L = -u_0 v_0 + u.v of vectors (..., d + 1): (..., 1)."""
    return (u[..., 1:] * v[..., 1:]).sum(-1, keepdim=True) - u[..., :1] * v[..., :1]


def tangent(x: Tensor, u: Tensor) -> Tensor:
    """Return the tangent vector at x in float64 with the space coordinates of u, whose time coordinate is rounded."""
    space = u[..., 1:].double()
    return torch.cat([(x[..., 1:] * space).sum(-1, keepdim=True) / x[..., :1], space], dim=-1)
