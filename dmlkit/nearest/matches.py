"""Matches of local features of two images: patches, or keypoints that fit one affine map; scores of a `Rescorer`."""

from collections.abc import Callable
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.files.source import SIFT

Match = Callable[[int, Tensor], Tensor]
"""Function of a row of some queries and rows (K,) of some images, which returns how well they match (K,), from 0."""
AT_ONCE = 16  # queries whose candidates are in memory at once: 36 MB of 100 patches of 112 numbers


def match_scores(
    kind: str, features_at: Callable[[Tensor], Tensor], advance: Callable[[int], None] = lambda _: None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the scores of a `dmlkit.nearest.rescore.Rescorer`: how well local features of images match.

    Args:
        features_at: returns the features (M, P, C) float16 of images, given their numbers (M,).
    """

    def patches(ours: Tensor, theirs: Tensor) -> Match:
        return lambda row, rows: match_patches(ours[row].float(), theirs.index_select(0, rows).float())

    def scores(queries: Tensor, items: Tensor) -> Tensor:
        found = torch.empty(items.shape, dtype=torch.float64)
        for rows in torch.arange(len(queries)).split(AT_ONCE):
            once, places = items[rows].unique(return_inverse=True)
            ours, theirs = features_at(queries[rows]), features_at(once)
            match = match_keypoints(Keypoints.of(ours), Keypoints.of(theirs)) if kind == SIFT else patches(ours, theirs)
            for row, place in enumerate(places):
                found[rows[row]] = match(row, place)
            advance(len(rows))
        return found

    return scores


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


MOST_KEYPOINTS = 128  # of an image, those of the highest contrast: 100 candidates are matched in 18 ms
LARGEST_RATIO = 0.8  # of the distances of the nearest and the second keypoint (Lowe 2004)
TOLERANCE = 0.03  # of the longer side
HYPOTHESES = 128  # of three matches each: with 3 of 10 matches right, 97 % of the pairs have a right one among them
LARGEST_CHANGE = 16.0  # of the area by a map, to either side: objects 4 times as large, or as small
LEAST_MATCHES = 3  # that define a map


class Keypoints(NamedTuple):
    """Keypoints of N images, at most `MOST_KEYPOINTS` of each."""

    places: Tensor
    """(N, P, 2) float32, by the longer side of the image."""
    descriptors: Tensor
    """(N, P, 128) float16, unit vectors; 0 where an image has fewer keypoints."""

    @property
    def packed(self) -> Tensor:
        """The same bits as one tensor (N, P, 132) float16: each float32 of a place takes two numbers."""
        return torch.cat([self.descriptors, self.places.contiguous().view(torch.float16)], dim=2)

    @classmethod
    def of(cls, packed: Tensor) -> "Keypoints":
        """Return the keypoints of `packed`."""
        return cls(packed[..., 128:].contiguous().view(torch.float32), packed[..., :128])


def match_keypoints(queries: Keypoints, gallery: Keypoints) -> Match:
    """Return a function that scores how well images (K,) of the gallery match a query, from 0 to 1: (K,).

    Keypoints match if they are each other's nearest, and clearly nearer than the second. The score is the logarithm of
    the number of matches that fit one affine map, plus one, by its largest value.
    """

    def scores(row: int, rows: Tensor) -> Tensor:
        descriptors = gallery.descriptors.index_select(0, rows)  # indexing by [rows] takes four times as long
        place, matched = matches(queries.descriptors[row].float(), descriptors.float())
        others = gallery.places[rows].gather(1, place[..., None].expand(-1, -1, 2))
        found = verify_affine(queries.places[row], others, matched, TOLERANCE)
        return (found.sum(1) + 1).log() / log(MOST_KEYPOINTS + 1)

    return scores


def matches(query: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
    """Match keypoints of a query with those of other images.

    Args:
        query: (P, 128) unit vectors, or zeros.
        items: (K, P, 128) those of K images.

    Returns:
        The nearest keypoint of each one of the query, (K, P), and whether it is a match, (K, P) bool.
    """
    cosines = (items.flatten(0, 1) @ query.T).unflatten(0, items.shape[:2])  # (K, keypoints of the item, of the query)
    best, nearest, mutual = mutual_nearest(cosines)
    second = cosines.scatter_(1, nearest[:, None], -1.0).amax(1)
    is_clear = (1 - best) < LARGEST_RATIO**2 * (1 - second)  # squared distances of unit vectors by two
    return nearest, mutual & is_clear & (best > 0)


def verify_affine(query: Tensor, items: Tensor, matched: Tensor, tolerance: float) -> Tensor:
    """Find the matches that fit the affine map of most of them, by RANSAC (Fischler & Bolles 1981), (K, M) bool.

    Maps that mirror, or change the area more than `LARGEST_CHANGE` times, are left out. The same matches give the same
    result.

    Args:
        query: (M, 2) places in the query.
        items: (K, M, 2) the matched places in K other images.
        matched: (K, M) bool, which of these are matches.
        tolerance: distance within which a match fits, in the units of the places.

    Example:
        >>> query = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 0.2]])
        >>> turned = torch.stack([2 - query[:, 1], query[:, 0]], dim=1)  # by 90 degrees, and moved
        >>> turned[4] = 9.0
        >>> verify_affine(query, turned[None], torch.ones(1, 5, dtype=torch.bool), 0.1).tolist()
        [[True, True, True, True, False]]
    """
    inliers = torch.zeros_like(matched)
    enough = (matched.sum(1) >= LEAST_MATCHES).nonzero()[:, 0]
    if not len(enough):
        return inliers
    places, others, kept = query.T, items[enough].movedim(2, 0), matched[enough]  # (2, M), (2, K', M) and (K', M)
    pairs, numbers = kept.nonzero(as_tuple=True)  # the T matches of all pairs in one list, since most pairs have few
    first, second, counts = places[:, numbers], others[:, pairs, numbers], kept.sum(1)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(len(enough), HYPOTHESES, LEAST_MATCHES, generator=generator) * counts[:, None, None]
    drawn = drawn.long() + (counts.cumsum(0) - counts)[:, None, None]  # (K', H, 3), places in the list
    tried = _maps_through(first[:, drawn], second[:, drawn], tolerance)  # (3, 2, K', H)
    fits = _fitting(first[..., None], second[..., None], tried.index_select(2, pairs), tolerance)  # (T, H)
    rows = torch.arange(len(enough))
    votes = (rows[:, None] == pairs).float() @ fits.float()  # (K', H)
    fitted = tried[:, :, rows, votes.argmax(1)]
    found = _fitting(places[:, None], others, fitted[..., None], tolerance) & kept
    again = _least_squares(places, others, found, fitted)
    wider = _fitting(places[:, None], others, again[..., None], tolerance) & kept
    is_better = wider.sum(1) > found.sum(1)
    found[is_better] = wider[is_better]
    inliers[enough] = found
    return inliers


def _maps_through(places: Tensor, items: Tensor, tolerance: float) -> Tensor:
    """Return the maps (3, 2, ...) of three places (2, ..., 3) to three others; zeros if they are on a line."""
    start, end = places[..., 0], items[..., 0]
    (x, y), (u, v) = ((three[..., 1:] - three[..., :1]).unbind() for three in (places, items))  # sides: (..., 2) each
    area = x[..., 0] * y[..., 1] - x[..., 1] * y[..., 0]
    is_line = area.abs() < tolerance**2  # or a match twice
    inverse = torch.stack([y[..., 1], -y[..., 0], -x[..., 1], x[..., 0]]).unflatten(0, (2, 2)) / area.where(~is_line, 1)
    linear = (inverse[:, :, None] * torch.stack([u, v]).movedim(-1, 0)).sum(1)  # (2, 2, ...)
    return torch.cat([linear, (end - (start[:, None] * linear).sum(0))[None]]).where(~is_line, 0)


def _fitting(places: Tensor, items: Tensor, maps: Tensor, tolerance: float) -> Tensor:
    """Return which of the places (2, ...) a map (3, 2, ...) brings near the others (2, ...), if it is allowed."""
    areas = maps[0, 0] * maps[1, 1] - maps[0, 1] * maps[1, 0]
    is_allowed = (areas > 1 / LARGEST_CHANGE) & (areas < LARGEST_CHANGE)
    moved = maps[2].addcmul(maps[0], places[0]).addcmul_(maps[1], places[1])  # coordinates first: 128 maps in a row
    return ((moved - items).square_().sum(0) <= tolerance**2) & is_allowed


def _least_squares(places: Tensor, items: Tensor, used: Tensor, otherwise: Tensor) -> Tensor:
    """Return the maps (3, 2, K) with the smallest squared errors of the matches used (K, M), if there are enough."""
    rows = torch.cat([places, torch.ones_like(places[:1])]).T  # (M, 3)
    weighted = (rows * used[..., None]).mT  # (K, 3, M)
    gram = weighted @ rows + 1e-9 * torch.eye(3)
    enough = (used.sum(1) > LEAST_MATCHES) & (torch.linalg.det(gram).abs() > 1e-9)
    fitted = torch.linalg.solve(gram.where(enough[:, None, None], torch.eye(3)), weighted @ items.movedim(0, 2))
    return fitted.movedim(0, 2).where(enough, otherwise)
