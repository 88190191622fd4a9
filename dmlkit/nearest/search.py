"""Exact nearest neighbors on every manifold by inner products, for points in memory or in blocks from a disk.

Float32 products order the gallery, but with rounding errors. The short list that they give is provably long enough, and
is ranked again by the stable similarity in float64.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold, find_invalid_point
from dmlkit.manifolds.products import inner_products_into

MARGIN = 8  # candidates beyond k: enough at the first try for all but near-duplicates; 16 take 5 % longer
RANKED_ELEMENTS = 2**19  # float64 coordinates ranked at once: 100 of each of 1 000 queries in 0.12 to 0.15 s; 2**18 and
# 2**20 take up to 1.6 times as long, the one in calls and the other beyond the cache
QUERY_ROWS = 4096  # searched at once: their vectors take 16 MB at 512 dimensions
PRODUCT_ROWS = 128  # queries whose products with a block are in memory at once: 34 MB
BLOCK_ROWS = 65_536  # of stored points in memory at once: 134 MB at 512 dimensions, twice that with vectors


class Neighbors(NamedTuple):
    """Nearest gallery points of each query, nearest first; of equally near ones the lower index first."""

    similarities: Tensor  # (Q, k) in the dtype of the gallery
    indices: Tensor  # (Q, k) int64, rows of the gallery

    @classmethod
    def joined(cls, blocks: Iterable["Neighbors"], k: int) -> "Neighbors":
        """Join the neighbors of blocks of queries, of which there may be none."""
        parts = list(blocks) or [cls(torch.empty(0, k), torch.empty(0, k, dtype=torch.int64))]
        return cls(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def without(self, rows: Tensor) -> "Neighbors":
        """Return the neighbors (Q, k - 1) other than each query itself, given the rows (Q,) of the queries.

        Where a query is not among its neighbors, because k others equal it, the last one is left out.
        """
        kept = self.indices != rows[:, None]
        kept[kept.all(1), -1] = False
        return Neighbors(*(column[kept].view(len(rows), column.shape[1] - 1) for column in self))


class PointSearch(Protocol):
    """A search for the nearest points."""

    def search(self, queries: Tensor, k: int) -> Neighbors:
        """Return the k most similar points of each query (Q, D)."""
        ...


class StoredPoints(Protocol):
    """Points, more than memory may hold."""

    def __len__(self) -> int: ...

    def blocks(self, rows: int) -> Iterator[Tensor]:
        """Yield all points in order, at most ``rows`` rows (n, D) at a time, each checked to be on the manifold."""
        ...

    def points_at(self, rows: Tensor) -> Tensor:
        """Return the points (M, D) of rows (M,)."""
        ...


class StoredGallery:
    r"""Exact search in points, which are read once for all queries of a search, or again for near-duplicates.

    A float32 product of n terms is off by at most :math:`\rho B`, with :math:`\rho = (n + 4) 2^{-24}`, rounded inputs
    included, and :math:`B \ge \sum_i |q_i g_i|` (Higham 2002, eq. 3.5). Three more coordinates on either side add
    :math:`\rho B` to each product, so that the products order by an upper bound: a point left out of the short list
    has a similarity of at most the list's last bound. The list is complete where its k-th best exact similarity is
    above that bound, and is doubled where it is not.

    Args:
        keeps_vectors: keep vectors that are computed of the points for the next search.
    """

    def __init__(self, manifold: Manifold, stored: StoredPoints, *, keeps_vectors: bool = False) -> None:
        self.manifold, self.stored, self.keeps_vectors = manifold, stored, keeps_vectors
        self._longest: dict[int, float] = {}  # length of the longest point of each block, by its first row
        self._vectors: dict[int, Tensor] = {}  # of each block, where they are kept

    @torch.no_grad()
    def search(self, queries: Tensor, k: int) -> Neighbors:
        """Return the k most similar gallery points of each query (Q, D)."""
        _check_points("queries", queries, self.manifold)
        size = len(self.stored)
        if not 1 <= k <= size:
            raise ValueError(f"Gallery.search: k must be from 1 to {size}, the size of the gallery, got {k}")
        vectors = self.manifold.index_vectors(queries.double(), "query")
        rounding = 1.01 * (vectors.shape[1] + 7) * 2.0**-24
        bounded = torch.cat([vectors, rounding * magnitudes(vectors)], dim=1).float()
        similarities = torch.empty(len(queries), k, dtype=torch.float64)
        indices = torch.empty(len(queries), k, dtype=torch.int64)
        open_queries = torch.arange(len(queries))
        length = min(k + MARGIN, size)
        while len(open_queries):
            bounds, candidates = self.short_list(bounded[open_queries], length)
            best = self._rank(queries[open_queries], candidates, k)
            similarities[open_queries], indices[open_queries] = best
            last = self.manifold.index_vectors(self.stored.points_at(best.indices[:, -1]).double(), "gallery")
            exact = (vectors[open_queries] * last).sum(1)
            open_queries = open_queries[(exact <= bounds[:, -1]) & (length < size)]  # equal if all are 0
            length = min(2 * length, size)
        return Neighbors(similarities.to(queries.dtype), indices)

    def _rank(self, queries: Tensor, candidates: Tensor, k: int) -> Neighbors:
        """Return the best k of candidates (Q, L) by the stable similarity, in float64."""
        candidates = candidates.sort(dim=1).values
        width = min(candidates.shape[1], max(1, RANKED_ELEMENTS // queries.shape[1]))
        height = max(1, RANKED_ELEMENTS // (width * queries.shape[1]))
        similarity = torch.empty(candidates.shape, dtype=torch.float64)
        for row in range(0, len(queries), height):
            query = queries[row : row + height, None].double()
            for column in range(0, candidates.shape[1], width):
                block = (slice(row, row + height), slice(column, column + width))
                ids = candidates[block]
                points = self.stored.points_at(ids.flatten()).unflatten(0, ids.shape)
                similarity[block] = self.manifold.paired_similarity(query, points.double())
        order = similarity.argsort(dim=1, descending=True, stable=True)[:, :k]
        return Neighbors(similarity.gather(1, order), candidates.gather(1, order))

    def short_list(self, bounded: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the largest products of query vectors (Q, D' + 3), and their rows, both (Q, length)."""
        bounds, rows, start = torch.empty(len(bounded), 0), torch.empty(len(bounded), 0, dtype=torch.int64), 0
        for block in self.stored.blocks(BLOCK_ROWS):
            query_vectors, vectors, offset = self._of_block(bounded, block, start)
            products, count = torch.empty(min(len(bounded), PRODUCT_ROWS), len(block)), min(length, len(block))
            pieces = query_vectors.split(PRODUCT_ROWS)
            nearest = [inner_products_into(piece, vectors, products).topk(count) for piece in pieces]
            bounds = torch.cat([bounds, torch.cat([best.values for best in nearest]) + offset], dim=1)
            rows = torch.cat([rows, torch.cat([best.indices for best in nearest]) + start], dim=1)
            # stable: of equal bounds the earlier row stays
            bounds, order = bounds.sort(dim=1, descending=True, stable=True)
            bounds, rows = bounds[:, :length], rows.gather(1, order[:, :length])
            start += len(block)
            del block, vectors  # else they would stay while the next ones are made
        return bounds, rows

    def _of_block(self, bounded: Tensor, points: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the query and gallery matrices to multiply, and an offset (Q, 1) to add to the products.

        Vectors that differ from their points are computed in float64, with their own bounds. Points that are their own
        vectors are not copied: the rounding bound of the longest is added to all products, which keeps their order, and
        rounds once where three more products would round three times. Copying them with their own bounds would take a
        tenth of the time of the search. Where the manifold does not bound their length, it is kept for the next search:
        for one query it takes as long as the products.
        """
        first = points[:1]
        if self.manifold.index_vectors(first, "gallery") is first:
            if start not in self._longest:
                longest = self.manifold.longest
                self._longest[start] = longest if longest < inf else float(points.norm(dim=1).max())
            rounding = bounded[:, -3:].norm(dim=1, keepdim=True) * self._longest[start]
            return bounded[:, :-3].contiguous(), points.float().contiguous(), rounding
        if (vectors := self._vectors.get(start)) is None:
            vectors, row = torch.empty(len(points), bounded.shape[1]), 0
            for piece in points.split(max(1, CACHED_ELEMENTS // points.shape[1])):
                exact = self.manifold.index_vectors(piece.double(), "gallery").detach()
                target = vectors[row : row + len(piece)]
                target[:, :-3], target[:, -3:] = exact, magnitudes(exact)
                row += len(piece)
            if self.keeps_vectors:
                self._vectors[start] = vectors
        return bounded, vectors, torch.zeros(1, 1)


@dataclass(frozen=True)
class _InMemory:
    points: Tensor

    def __len__(self) -> int:
        return len(self.points)

    def blocks(self, rows: int) -> Iterator[Tensor]:
        yield from self.points.split(rows)

    def points_at(self, rows: Tensor) -> Tensor:
        return self.points.index_select(0, rows)


class Gallery(StoredGallery):
    """Points of a manifold in memory, ready to be searched repeatedly: vectors that are computed of them are kept.

    Example:
        >>> from dmlkit.manifolds import Poincare
        >>> ball = Poincare(2)
        >>> gallery = Gallery(ball, ball.from_features(torch.tensor([[0.0, 0.0], [0.5, 0.0], [2.0, 0.0]])))
        >>> gallery.search(ball.from_features(torch.tensor([[0.4, 0.0]])), k=2).indices
        tensor([[1, 0]])
    """

    def __init__(self, manifold: Manifold, points: Tensor) -> None:
        _check_points("points", points, manifold)
        if len(points) == 0:
            raise ValueError("Gallery: expected at least one point, got none")
        super().__init__(manifold, _InMemory(points.detach()), keeps_vectors=True)


def _check_points(name: str, points: Tensor, manifold: Manifold) -> None:
    if points.ndim != 2 or points.shape[1] != manifold.point_dim:
        raise ValueError(f"Gallery: expected {name} of shape (N, {manifold.point_dim}), got {tuple(points.shape)}")
    fault = find_invalid_point(manifold, points)
    if fault is not None:
        raise ValueError(f"Gallery: {name}: row {fault[0]}: {fault[1]}")


CACHED_ELEMENTS = 2**18  # float64 coordinates at once: 2 MB stay in cache, 4 times as fast as 8 MB


def magnitudes(vectors: Tensor) -> Tensor:
    """Return the lengths (N, 3) of three blocks of coordinates: their products bound sum_i |q_i g_i| (Cauchy-Schwarz).

    The first and the last coordinate are blocks of their own, since the lifts put their large coordinate there.
    """
    middle = vectors[:, 1:-1].norm(dim=1)
    return torch.stack([vectors[:, 0].abs(), middle, vectors[:, -1].abs()], dim=1)
