"""Local scores: how well the patches of two images match, for the nearest candidates of each query."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold

CANDIDATES = 100  # images per query whose patches are compared, as many as WildFusion compares at its budget of 100
Match = Callable[[int, Tensor], Tensor]
"""Function of a row of the queries and rows (K,) of the gallery, which returns their scores (K,)."""


def mutual_nearest(cosines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the nearest feature of an image for each one of a query, and whether each is also the nearest of the other.

    Args:
        cosines: (K, I, P), of I features of each of K images with P of the query.

    Returns:
        The largest cosine, the number of the feature that has it, and whether both are nearest, (K, P) each.
    """
    best, nearest = cosines.max(1)
    return best, nearest, cosines.argmax(2).gather(1, nearest) == torch.arange(cosines.shape[2])


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
    best, _, mutual = mutual_nearest(items @ query.T)
    return (best.clamp(min=0) * mutual).mean(1)


class LocalScores(NamedTuple):
    """Local scores of the nearest candidates, which are ordered again by both similarities."""

    candidates: Tensor
    """(Q, K) rows of the gallery: the nearest ones."""
    scores: Tensor
    """(Q, K) from 0 to 1, e.g. of `match_patches`."""
    share: float
    """Weight of the scores, in [0, 1]; the similarity has the rest."""

    def rows(self, space: Manifold, queries: Tensor, gallery: Tensor) -> Callable[[Tensor], Tensor]:
        """Return a function of rows (n,) of queries: scores (n, N), highest for the candidates, in their new order.

        Args:
            space: geometry of the points.
            queries: (Q, D) points.
            gallery: (N, D) points.
        """

        def rows(block: Tensor) -> Tensor:
            similarity = space.similarity(queries[block], gallery).double()
            chosen = self.candidates[block]
            mixed = (1 - self.share) * similarity.gather(1, chosen) + self.share * self.scores[block].double()
            above = similarity.amax() - mixed.amin() + 1  # above every score that is not ordered again
            return similarity.scatter(1, chosen, mixed + above)

        return rows


def patch_matches(queries: Tensor, gallery: Tensor) -> Match:
    """Return the function of `score_candidates` for patches.

    Args:
        queries: (Q, P, C) unit vectors, in any precision.
        gallery: (N, P, C).
    """
    return lambda row, rows: match_patches(queries[row].float(), gallery[rows].float())


def score_candidates(
    manifold: Manifold,
    points: tuple[Tensor, Tensor],
    match: Match,
    advance: Callable[[int], None] = lambda _: None,
) -> LocalScores:
    """Score each query and its nearest images; the share is 0.

    Args:
        manifold: geometry of the points.
        points: of the queries (Q, D) and of the gallery (N, D).
        match: scores of pairs, e.g. `patch_matches`.
        advance: receives how many more queries have been scored.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> patches = torch.eye(3)[:, None]
        >>> points = torch.zeros(1, 1), torch.arange(3.0)[:, None]
        >>> found = score_candidates(Euclidean(1), points, patch_matches(patches[:1], patches))
        >>> found.candidates, found.scores
        (tensor([[0, 1, 2]]), tensor([[1., 0., 0.]]))
    """
    queries, gallery = points
    count = min(CANDIDATES + 1, len(gallery))  # an image may find itself
    chosen, scores = torch.empty(len(queries), count, dtype=torch.int64), torch.empty(len(queries), count)
    for row, query in enumerate(queries):
        chosen[row] = manifold.similarity(query[None], gallery)[0].topk(count).indices
        scores[row] = match(row, chosen[row])
        advance(1)
    return LocalScores(chosen, scores, 0.0)
