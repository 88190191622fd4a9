"""Similarities that look at more than points: at matching patches of two images, or at their places and times.

The patches are compared for the nearest candidates of each query. Places and times are evidence that two images show
the same individual.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold


class OtherScores(Protocol):
    """Scores that order what a search found once more."""

    def rows(self, block: Tensor, space: Manifold, queries: Tensor, gallery: Tensor) -> Tensor:
        """Return scores (n, N) of rows (n,) of the queries.

        Args:
            block: rows of the queries.
            space: geometry of the searched points.
            queries: (Q, D) points.
            gallery: (N, D) points.
        """
        ...


def ordered_first(scores: Tensor, chosen: Tensor, values: Tensor) -> Tensor:
    """Return scores (n, N) that are highest for the chosen (n, K), in the order of their values (n, K).

    Example:
        >>> ordered_first(torch.tensor([[5.0, 2.0, 1.0]]), torch.tensor([[1, 2]]), torch.tensor([[0.0, 1.0]]))
        tensor([[5., 6., 7.]])
    """
    return scores.scatter(1, chosen, values + (scores.amax() - values.amin() + 1))


class ScoredSpace(Manifold):
    """Geometry of points followed by other coordinates of their images: there is a similarity, and nothing else.

    Args:
        space: geometry of the points.
        width: number of the other coordinates.
        what: what they are.
    """

    def __init__(self, space: Manifold, width: int, what: Literal["place", "matches"]) -> None:
        super().__init__(space.dim)
        self.space, self.width, self.what = space, width, what
        self.point_dim, self.similarity_name = space.point_dim + width, f"{space.similarity_name}_and_{what}"

    def distance_off(self, points: Tensor) -> Tensor:
        """Return how far the points are from their manifold."""
        return self.space.distance_off(points[..., : -self.width])

    def _refuse(self, *_: Any, **__: Any) -> Any:
        """Raise an error: there is a similarity alone."""
        raise NotImplementedError(f"points with {self.what} have a similarity alone; compare them without {self.what}")

    from_features = distance = paired_distance = product_vectors = distance_vectors = _refuse


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
    back = torch.from_numpy(cosines.numpy().argmax(2))  # the same as torch's, in a fifth of the time
    return best, nearest, back.gather(1, nearest) == torch.arange(cosines.shape[2])


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

    def rows(self, block: Tensor, space: Manifold, queries: Tensor, gallery: Tensor) -> Tensor:
        """Return the scores of `OtherScores`, highest for the candidates, in their new order."""
        similarity, chosen = space.similarity(queries[block], gallery).double(), self.candidates[block]
        mixed = (1 - self.share) * similarity.gather(1, chosen) + self.share * self.scores[block].double()
        return ordered_first(similarity, chosen, mixed)


def patch_matches(queries: Tensor, gallery: Tensor) -> Match:
    """Return the function of `score_candidates` for patches.

    Args:
        queries: (Q, P, C) unit vectors, in any precision.
        gallery: (N, P, C).
    """
    return lambda row, rows: match_patches(queries[row].float(), gallery.index_select(0, rows).float())


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


EARTH = 6371.0088  # mean radius in km
SURE = 0.99  # probability that an individual is in its home range at the same time


class Sightings(NamedTuple):
    """Where and when images were taken."""

    places: Tensor
    """(N, 3) float64, unit vectors from the center of the Earth; nan where the place or the time is not known."""
    days: Tensor
    """(N,) float64, times in days."""

    @classmethod
    def at(cls, latitude: Tensor, longitude: Tensor, days: Tensor) -> "Sightings":
        """Return the sightings at degrees (N,) of latitude and longitude, all float64.

        Example:
            >>> degrees = torch.tensor([0.0, 0.0], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
            >>> two = Sightings.at(*degrees, torch.zeros(2))
            >>> kilometers(two.places[0], two.places[1]).item().__round__(1)
            111.2
        """
        north, east = latitude.deg2rad(), longitude.deg2rad()
        return cls(torch.stack([north.cos() * east.cos(), north.cos() * east.sin(), north.sin()], dim=-1), days)

    def chosen(self, rows: Tensor) -> "Sightings":
        """Return some of the sightings, by rows or (N,) bool."""
        return Sightings(self.places[rows], self.days[rows])


def kilometers(first: Tensor, second: Tensor) -> Tensor:
    """Return the distances (...) on a sphere of the Earth's mean radius, of unit vectors (..., 3), broadcast."""
    return 2 * EARTH * ((first - second).square().sum(-1).sqrt() / 2).clamp(max=1).asin()


class Range(NamedTuple):
    r"""How far apart sightings of one individual are, and of different ones.

    The evidence of two sightings at distance d and t days apart is the logarithm of a ratio of likelihoods, that of one
    individual by that of two:

    .. math:: \log \left( 1 - a + a \frac{R^2}{r^2} e^{-d^2 / (2 r^2) + d^2 / (2 R^2)} \right), \quad
              a = 0.99 e^{-t / \tau}.

    The half-normal :math:`e^{-d^2 / (2 r^2)}` has the form of a detection function of spatial capture-recapture, in
    which d is the distance of a trap from the center of a home range (Efford 2004, Oikos 106, 598-610; function 0 of
    the R package secr). With time, or in 1 of 100 cases, an individual may be anywhere: the evidence decays to 0, and
    is at least log 0.01. It is 0 where a place or time is not known.
    """

    kilometers: float
    """r, standard deviation of the distance of two sightings of one individual, in each direction."""
    spread: float
    """R, the same for different individuals; at least r."""
    days: float
    """tau, time after which the evidence has decayed to 1 / e; infinite: it does not decay."""

    def evidence(self, first: Sightings, second: Sightings) -> Tensor:
        """Return the evidence (...) of sightings, broadcast, float64, in nats.

        Example:
            >>> there = Sightings.at(*torch.zeros(2, 1, dtype=torch.float64), torch.zeros(1))
            >>> Range(1.0, 10.0, days=float("inf")).evidence(there, there).round(decimals=3)  # log(0.01 + 0.99 * 100)
            tensor([4.5950], dtype=torch.float64)
        """
        squares = kilometers(first.places, second.places).square()
        ratio = (self.spread / self.kilometers) ** 2 * (squares * (self.spread**-2 - self.kilometers**-2) / 2).exp()
        sure = SURE * ((first.days - second.days).abs() / -self.days).exp()
        return torch.log1p(sure * (ratio - 1)).nan_to_num(nan=0.0)


class PlaceScores(NamedTuple):
    """Evidence of place and time, which is added to the similarity of all images."""

    queries: Sightings
    gallery: Sightings
    range: Range
    share: float
    """Weight of the evidence, in [0, 1]; the similarity has the rest."""

    def rows(self, block: Tensor, space: Manifold, queries: Tensor, gallery: Tensor) -> Tensor:
        """Return the scores of `OtherScores`."""
        similarity = space.similarity(queries[block], gallery).double()
        return with_evidence(similarity, self.queries.chosen(block), self.gallery, self.range, self.share)


def with_evidence(similarity: Tensor, first: Sightings, second: Sightings, range: Range, share: float) -> Tensor:  # noqa: A002
    """Return similarities (n, N) mixed with the evidence of the sightings, which has a share of them."""
    scores = (1 - share) * similarity
    for row in torch.arange(len(scores))[:, None]:  # at once they would take three times the memory of the scores
        scores[row] += share * range.evidence(first.chosen(row), second)
    return scores


WIDTH = 4  # coordinates of a sighting behind those of a point: three of the place, one of the time


class PlacedSpace(ScoredSpace):
    """Geometry of points that are followed by their sightings, in float64: there is a similarity, and no distance.

    The similarity is that of the points with the evidence of the sightings, in the shares of `PlaceScores`.

    Args:
        space: geometry of the points.
        range: how far apart sightings are.
        share: weight of the evidence, in [0, 1].

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> space = PlacedSpace(Sphere(2), Range(1.0, 10.0, days=float("inf")), 0.5)
        >>> there = Sightings.at(*torch.zeros(2, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
        >>> points = space.placed(torch.tensor([[1.0, 0.0]]), there)
        >>> space.similarity(points, points).round(decimals=3)  # 0.5 + 0.5 * log(0.01 + 0.99 * 100)
        tensor([[2.7980]], dtype=torch.float64)
    """

    def __init__(self, space: Manifold, range: Range, share: float) -> None:  # noqa: A002
        super().__init__(space, WIDTH, "place")
        self.range, self.share = range, share

    def placed(self, points: Tensor, sightings: Sightings) -> Tensor:
        """Return points (N, D) followed by their sightings, (N, D + 4) float64."""
        return torch.cat([points.double(), sightings.places, sightings.days[:, None]], dim=1)

    def similarity(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the similarities of points x (N, D + 4) and y (M, D + 4): (N, M)."""
        (first, seen), (second, others) = self._split(x), self._split(y)
        return with_evidence(self.space.similarity(first, second), seen, others, self.range, self.share)

    def paired_similarity(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the similarities of points x (..., D + 4) and y (..., D + 4), broadcast: (...)."""
        (first, seen), (second, others) = self._split(x), self._split(y)
        evidence = self.range.evidence(seen, others)
        return (1 - self.share) * self.space.paired_similarity(first, second) + self.share * evidence

    def _split(self, points: Tensor) -> tuple[Tensor, Sightings]:
        return points[..., :-WIDTH], Sightings(points[..., -WIDTH:-1], points[..., -1])
