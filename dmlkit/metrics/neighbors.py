"""One exact search for all retrieval metrics."""

import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold

BLOCK = 1024  # queries searched at once: 1 024 x 60 502 float32 products are 248 MB


def nearest_neighbors(manifold: Manifold, points: Tensor, k: int) -> Tensor:
    """The k nearest other points of each point: indices (N, k), nearest first.

    Args:
        manifold: its ``index_vectors`` give the order.
        points: (N, D).
        k: at most N - 1.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> nearest_neighbors(Euclidean(1), torch.tensor([[0.0], [1.0], [5.0]]), k=2).tolist()
        [[1, 2], [0, 2], [1, 0]]
    """
    queries = manifold.index_vectors(points, "query")
    gallery = manifold.index_vectors(points, "gallery").T
    found: list[Tensor] = []
    for start in range(0, len(points), BLOCK):
        products = queries[start : start + BLOCK] @ gallery  # (block, N)
        products.diagonal(start).fill_(-torch.inf)  # the query itself, known by its index
        found.append(products.topk(k).indices)
    return torch.cat(found)
