"""The Poincaré disk: where 2-d hyperbolic embeddings lie in it, and its geodesics."""

from typing import Any

import torch
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.lorentz import Lorentz
from dmlkit.manifolds.poincare import Poincare

ARC_POINTS = 30  # of a drawn geodesic


def to_unit_disk(manifold: Manifold, points: Tensor) -> Tensor:
    """Points (N, 2) of the unit disk, an isometry up to the scale of the curvature.

    Raises:
        UserError: the manifold is another, or the points are not 2-d.
    """
    if not isinstance(manifold, Poincare | Lorentz) or manifold.dim != 2:
        raise UserError(
            f"plot: the disk shows 2-d embeddings on poincare or lorentz, got {manifold.dim}-d on "
            f"{type(manifold).__name__.lower()}; use --kind pca or --kind tsne"
        )
    root = (-manifold.curvature.detach()).sqrt()
    if isinstance(manifold, Poincare):
        return root * points
    return root * points[:, 1:] / (1 + root * points[:, :1])


def draw_disk(axes: Any, place: Tensor, labels: Tensor, colors: dict[int, Any]) -> None:
    """The boundary, and a geodesic from the centroid of each class to each of its points, in the class's colour."""
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Circle

    axes.add_patch(Circle((0, 0), 1, fill=False, color="0.3"))
    axes.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05))
    axes.axis("off")
    for label, color in colors.items():
        chosen = place[labels == label]
        arcs = list(geodesics(centroid(chosen), chosen).numpy())
        axes.add_collection(LineCollection(arcs, colors=[color], linewidths=0.5, alpha=0.5))


def lift(place: Tensor) -> Tensor:
    """Points (..., 3) of the hyperboloid with K = -1 above points (..., 2) of the unit disk."""
    squared = place.double().square().sum(-1, keepdim=True)
    return torch.cat([1 + squared, 2 * place], dim=-1) / (1 - squared)


def lower(space: Tensor) -> Tensor:
    """Points (..., 2) of the unit disk under the rays through timelike vectors (..., 3)."""
    length = (space[..., :1].square() - space[..., 1:].square().sum(-1, keepdim=True)).clamp(min=1e-12).sqrt()
    return space[..., 1:] / (length + space[..., :1])


def centroid(place: Tensor) -> Tensor:
    """The hyperbolic centroid (2,) of points (N, 2): the ray through the mean on the hyperboloid."""
    return lower(lift(place).mean(0))


def geodesics(start: Tensor, ends: Tensor) -> Tensor:
    """Arcs (N, 30, 2) from one point (2,) to points (N, 2): straight lines on the rays of the hyperboloid.

    Example:
        >>> arc = geodesics(torch.tensor([0.5, 0.0]), torch.tensor([[0.0, 0.5]]))[0]
        >>> [round(x, 6) for x in arc[0].tolist()], bool(arc.norm(dim=1).min() < 0.354)  # it bends towards the origin
        ([0.5, 0.0], True)
    """
    share = torch.linspace(0, 1, ARC_POINTS, dtype=torch.float64)[:, None]
    return lower((1 - share) * lift(start) + share * lift(ends)[:, None])
