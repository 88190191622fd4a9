"""A second similarity of images, by which the nearest ones are ordered again: matches of the patches of two images."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold
from dmlkit.nearest.search import Neighbors, PointSearch

CANDIDATES = 100  # images per query whose patches are compared, as many as WildFusion compares at its budget of 100


@dataclass(frozen=True)
class Rescorer:
    """Second similarity of images, which are given by numbers, with its weight.

    Example:
        >>> hours = torch.tensor([9.0, 10.0, 18.0])
        >>> by_hour = Rescorer(lambda queries, items: -(hours[queries, None] - hours[items]).abs(), share=0.5, most=2)
        >>> by_hour.mixed(torch.tensor([[4.0, 2.0]]), torch.tensor([0]), torch.tensor([[1, 2]]))
        tensor([[ 1.5000, -3.5000]], dtype=torch.float64)
    """

    score: Callable[[Tensor, Tensor], Tensor]
    """Function of queries (Q,) and K images for each, (Q, K), both int64, that returns their scores (Q, K)."""
    share: float
    """Weight of the scores, in [0, 1]; the similarity of points has the rest."""
    most: int
    """Number of nearest images of a query that are scored; the scores are at least 0, and 0 for the others."""
    what: str = ""
    """What is compared; it follows the name of the similarity of points."""

    def mixed(self, similarity: Tensor, queries: Tensor, items: Tensor) -> Tensor:
        """Return the weighted sums (Q, K) float64 of the similarities (Q, K) of points and the scores."""
        return (1 - self.share) * similarity.double() + self.share * self.score(queries, items).double()

    def between(self, queries: Tensor, items: Tensor) -> "Rescorer":
        """Return the same for rows of (M,) and (N,) images, which are given by their numbers."""

        def scores(rows: Tensor, others: Tensor) -> Tensor:
            return self.score(queries[rows], items[others])

        return replace(self, score=scores)


def nearest_rows(similarity: Tensor, most: int) -> Tensor:
    """Return the columns (n, K) of the candidates of n queries: one more than ``most``, since one may be the query."""
    return similarity.topk(min(most + 1, similarity.shape[1])).indices


def rescored_rows(rescorer: Rescorer, space: Manifold, queries: Tensor, gallery: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function of rows (n,) of queries (Q, D), which returns the scores (n, N) of a gallery (N, D).

    The nearest, which are scored, are before the others, in their new order.
    """

    def scores(block: Tensor) -> Tensor:
        similarity = space.exact_similarity(queries[block], gallery).double()
        chosen = nearest_rows(similarity, rescorer.most)
        values = rescorer.mixed(similarity.gather(1, chosen), block, chosen)
        return similarity.scatter(1, chosen, values + (similarity.amax() - values.amin() + 1))

    return scores


class RescoredSearch:
    """Search by the similarity of points and a second one.

    The nearest images, which are scored, are found by the search of the points: scores are never negative, so that an
    image without one is never before one of them.

    Args:
        numbers: (N,) int64, the numbers of the points' images.
    """

    def __init__(self, base: PointSearch, manifold: Manifold, rescorer: Rescorer, numbers: Tensor) -> None:
        self.base, self.rescorer, self.numbers = base, rescorer, numbers
        self.similarity_name = f"{manifold.similarity_name}_and_{rescorer.what}"

    @torch.no_grad()
    def search(
        self, queries: Tensor, k: int, asked: Tensor, left_out: tuple[np.ndarray, np.ndarray] | None = None
    ) -> Neighbors:
        """Return the k most similar points of each query (Q, D), those of its own unit with a similarity of -inf.

        Args:
            asked: (Q,) int64, the numbers of the queries' images.
            left_out: the units, integers from 0, of the points (N,) and of the queries (Q,). Default: no units.
        """
        neighbors = self._nearest(queries, k, left_out)
        scores, first = neighbors.similarities.double(), slice(self.rescorer.most)
        mixed = (1 - self.rescorer.share) * scores
        mixed[:, first] = self.rescorer.mixed(scores[:, first], asked, self.numbers[neighbors.indices[:, first]])
        mixed = torch.where(scores == -inf, scores, mixed)  # those that are left out stay at -inf
        scores, order = mixed.sort(dim=1, descending=True, stable=True)
        return Neighbors(scores[:, :k], neighbors.indices.gather(1, order[:, :k]))

    def _nearest(self, queries: Tensor, k: int, left_out: tuple[np.ndarray, np.ndarray] | None) -> Neighbors:
        """Return the images of queries that may be among the k most similar ones, nearest first if not all."""
        size = len(self.numbers)
        width = min(max(k, self.rescorer.most), size)
        most_left_out = 0 if left_out is None else int(np.bincount(left_out[0])[left_out[1]].max(initial=0))
        neighbors = self.base.search(queries, min(width + most_left_out, size))
        if left_out is None:
            return neighbors
        units, query_units = left_out
        scores = neighbors.similarities.double()
        scores[torch.from_numpy(units[neighbors.indices.numpy()] == query_units[:, None])] = -inf
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        return Neighbors(scores[:, :width], neighbors.indices.gather(1, order[:, :width]))


AT_ONCE = 16  # queries whose candidates are in memory at once: 36 MB of 100 patches of 112 numbers


def match_scores(
    features_at: Callable[[Tensor], Tensor], advance: Callable[[int], None] = lambda _: None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the scores of a `dmlkit.nearest.rescore.Rescorer`: how well the patches of images match.

    Args:
        features_at: returns the features (M, P, C) float16 of images, given their numbers (M,).
    """

    def scores(queries: Tensor, items: Tensor) -> Tensor:
        pair_scores = torch.empty(items.shape, dtype=torch.float64)
        for rows in torch.arange(len(queries)).split(AT_ONCE):
            distinct, inverse = items[rows].unique(return_inverse=True)
            ours, theirs = features_at(queries[rows]), features_at(distinct)
            for row, indices in enumerate(inverse):
                pair_scores[rows[row]] = match_patches(ours[row].float(), theirs.index_select(0, indices).float())
            advance(len(rows))
        return pair_scores

    return scores


def match_patches(query: Tensor, items: Tensor) -> Tensor:
    """Score how well the patches of images match those of a query: the mean cosine of mutual nearest neighbors.

    Pairs of patches that are each other's nearest add their cosine, at least 0; the sum is divided by the number of
    patches. The score is symmetric.

    Args:
        query: (P, C) unit vectors of patches.
        items: (K, P, C) those of K images.

    Returns:
        (K,) scores from 0 to 1.

    Example:
        >>> query = torch.eye(2)
        >>> match_patches(query, torch.stack([query.flip(0), query[[0, 0]]]))
        tensor([1.0000, 0.5000])
    """
    cosines = items @ query.T  # (K, patches of the image, patches of the query)
    best, nearest = cosines.max(1)
    back = torch.from_numpy(cosines.numpy().argmax(2))  # the same as torch's, in a fifth of the time
    mutual = back.gather(1, nearest) == torch.arange(len(query))
    return (best.clamp(min=0) * mutual).mean(1)
