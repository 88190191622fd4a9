"""The mean of points on a manifold."""

import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold

STEPS = 200  # maximum number of iterations; 5 to 30 suffice
PRECISION = 1e-10  # length of the mean tangent vector at which to stop; it is 0 at the mean


@torch.no_grad()
def frechet_mean(manifold: Manifold, points: Tensor) -> Tensor:
    r"""Compute the Fréchet mean: the point with minimum :math:`\sum_i d(m, x_i)^2`, in float64.

    If the similarity is an inner product or a cosine, not a distance, compute the point with the maximum sum of
    similarities, a mean direction; the same holds for the sphere's chord. In curved space, follow the mean tangent
    vector at m until it vanishes (Karcher flow); halve a step that increases the spread.

    Args:
        manifold: the geometry.
        points: (N, D), at least one.

    Returns:
        (D,) float64.

    Example:
        >>> from dmlkit.manifolds import Poincare
        >>> frechet_mean(Poincare(1), torch.tensor([[-0.5], [0.5]], dtype=torch.float64)).abs().item() < 1e-9
        True
    """
    points = points.double()
    if not manifold.similarity_name.endswith("distance") or getattr(manifold, "metric", "") == "chord":
        return manifold.from_features(manifold.product_vectors(points).mean(0))
    geometry = manifold.geometry
    mean = manifold.from_features(manifold.to_features(points).mean(0))
    spread, step = _spread(manifold, mean, points), 1.0
    for _ in range(STEPS):
        tangent = geometry.logmap(mean, points).mean(0)
        if tangent.norm() <= PRECISION:
            break
        nearer = geometry.expmap(mean, step * tangent)
        found = _spread(manifold, nearer, points)
        if found < spread:
            mean, spread = nearer, found
        else:
            step /= 2
            if step < PRECISION:
                break
    return mean


def _spread(manifold: Manifold, mean: Tensor, points: Tensor) -> Tensor:
    return manifold.paired_distance(mean, points).square().mean()
