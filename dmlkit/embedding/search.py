"""Exact nearest neighbours on every manifold through one FAISS inner-product index.

The index orders the gallery by float32 products, which round. Here the short list that it gives is long enough,
provably, and re-ranked by the stable similarity in float64.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold

MARGIN = 16  # candidates beyond k: enough at the first try for all but near-duplicates, 3 % of the search's time
CANDIDATE_ELEMENTS = 2**18  # float64 coordinates re-ranked at once: 2 MB stay in cache, 4 times as fast as 8 MB


class Neighbors(NamedTuple):
    """The nearest gallery points of each query, nearest first; of equally near ones the lower index first."""

    similarities: Tensor  # (Q, k) in the dtype of the gallery
    indices: Tensor  # (Q, k) int64, rows of the gallery


class Gallery:
    r"""Points of a manifold, ready to be searched.

    A float32 product of n terms is off by at most :math:`\rho B`, with :math:`\rho = (n + 4) 2^{-24}`, rounded inputs
    included, and :math:`B \ge \sum_i |q_i g_i|` (Higham 2002, eq. 3.5). Three more coordinates on either side add
    :math:`\rho B` to each product, so that the index orders by an upper bound: a point left out of the short list
    has a similarity of at most the list's last bound. The list is complete where its k-th best exact similarity is at
    least that bound, and is doubled where it is not.

    Args:
        manifold: the geometry; its similarity is the order.
        points: (N, D) float32; kept beside the index for the re-ranking.

    Raises:
        ValueError: the points are not (N, D) of this manifold, or there are none.

    Example:
        >>> from dmlkit.manifolds import Poincare
        >>> ball = Poincare(2)
        >>> gallery = Gallery(ball, ball.from_features(torch.tensor([[0.0, 0.0], [0.5, 0.0], [2.0, 0.0]])))
        >>> gallery.search(ball.from_features(torch.tensor([[0.4, 0.0]])), k=2).indices
        tensor([[1, 0]])
    """

    def __init__(self, manifold: Manifold, points: Tensor) -> None:
        import faiss

        _check_points("points", points, manifold)
        if len(points) == 0:
            raise ValueError("Gallery: expected at least one point, got none")
        self.manifold = manifold
        self.points = points.detach()
        vectors = manifold.index_vectors(self.points.double(), "gallery").detach()
        self.index = faiss.IndexFlatIP(vectors.shape[1] + 3)
        self.index.add(torch.cat([vectors, _magnitudes(vectors)], dim=1).float().numpy())

    @torch.no_grad()
    def search(self, queries: Tensor, k: int) -> Neighbors:
        """The k most similar gallery points of each query (Q, D).

        Raises:
            ValueError: the queries are not points of this manifold, or k is not in 1..N.
        """
        _check_points("queries", queries, self.manifold)
        size = len(self.points)
        if not 1 <= k <= size:
            raise ValueError(f"Gallery.search: k must be from 1 to {size}, the size of the gallery, got {k}")
        vectors = self.manifold.index_vectors(queries.double(), "query")
        rounding = 1.01 * (self.index.d + 4) * 2.0**-24
        bounded = torch.cat([vectors, rounding * _magnitudes(vectors)], dim=1).float()
        similarities = torch.empty(len(queries), k, dtype=torch.float64)
        indices = torch.empty(len(queries), k, dtype=torch.int64)
        open_queries = torch.arange(len(queries))
        length = min(k + MARGIN, size)
        while len(open_queries):
            bounds, candidates = map(torch.from_numpy, self.index.search(bounded[open_queries].numpy(), length))
            best = self._rank(queries[open_queries], candidates, k)
            similarities[open_queries], indices[open_queries] = best
            last = self.manifold.index_vectors(self.points[best.indices[:, -1]].double(), "gallery")
            exact = (vectors[open_queries] * last).sum(1)
            open_queries = open_queries[(exact < bounds[:, -1]) & (length < size)]
            length = min(2 * length, size)
        return Neighbors(similarities.to(self.points.dtype), indices)

    def _rank(self, queries: Tensor, candidates: Tensor, k: int) -> Neighbors:
        """The best k of candidates (Q, L) by the stable similarity, in float64."""
        candidates = candidates.sort(dim=1).values
        width = min(candidates.shape[1], max(1, CANDIDATE_ELEMENTS // queries.shape[1]))
        height = max(1, CANDIDATE_ELEMENTS // (width * queries.shape[1]))
        similarity = torch.empty(candidates.shape, dtype=torch.float64)
        for row in range(0, len(queries), height):
            query = queries[row : row + height, None].double()
            for column in range(0, candidates.shape[1], width):
                block = (slice(row, row + height), slice(column, column + width))
                ids = candidates[block]
                points = self.points.index_select(0, ids.flatten()).unflatten(0, ids.shape)
                similarity[block] = self.manifold.paired_similarity(query, points.double())
        order = similarity.argsort(dim=1, descending=True, stable=True)[:, :k]
        return Neighbors(similarity.gather(1, order), candidates.gather(1, order))


def _magnitudes(vectors: Tensor) -> Tensor:
    """Lengths (N, 3) of three blocks of the coordinates, whose products bound sum_i |q_i g_i| (Cauchy-Schwarz).

    The first and the last stand alone, as the lifts put their large coordinate there.
    """
    middle = vectors[:, 1:-1].norm(dim=1)
    return torch.stack([vectors[:, 0].abs(), middle, vectors[:, -1].abs()], dim=1)


def _check_points(name: str, points: Tensor, manifold: Manifold) -> None:
    if points.ndim != 2 or points.shape[1] != manifold.point_dim:
        raise ValueError(f"Gallery: expected {name} of shape (N, {manifold.point_dim}), got {tuple(points.shape)}")
    if not points.isfinite().all():
        raise ValueError(f"Gallery: expected finite {name}, got nan or inf")
