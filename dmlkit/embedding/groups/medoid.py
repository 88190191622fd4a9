"""How alike each point of a cluster is to all of it."""

import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold

ROWS = 1024  # distances of as many points to all are held at once: 82 MB in float64 for a cluster of 10 000


@torch.no_grad()
def similarity_sums(manifold: Manifold, points: Tensor) -> Tensor:
    """The sum of the similarities of each point (n, D) to all of them, in float64; the largest is the medoid's.

    Of inner products it is the product with the sum, so that no pair is looked at.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> similarity_sums(Euclidean(1), torch.tensor([[0.0], [1.0], [3.0]])).tolist()
        [-4.0, -3.0, -5.0]
    """
    points = points.double()
    if manifold.similarity_name.endswith("distance"):
        return torch.cat([manifold.similarity(block, points).sum(1) for block in points.split(ROWS)])
    vectors = manifold.product_vectors(points)
    return vectors @ vectors.sum(0)
