"""Spatial verification: whether matched places of two images fit one affine map, for many pairs of images at once."""

from typing import NamedTuple

import torch
from torch import Tensor

HYPOTHESES = 128  # of three matches each: with 3 of 10 matches right, 97 % of the pairs have a right one among them
LARGEST = 16.0  # change of the area by a map, to either side: objects 4 times as large, or as small
LEAST = 3  # matches that define a map


class Verified(NamedTuple):
    """Affine maps of K pairs of images, and the matches that fit them."""

    inliers: Tensor
    """(K, M) bool."""
    maps: Tensor
    """(K, 3, 2): the places of a query (M, 2), with a column of ones, times the map are those of the other image."""


def verify_affine(query: Tensor, items: Tensor, matched: Tensor, tolerance: float, *, seed: int = 0) -> Verified:
    """Find the affine map that most of the matches fit, by RANSAC (Fischler & Bolles 1981), and fit it to them.

    Maps that mirror, or change the area more than `LARGEST` times, are left out. The same seed gives the same maps.

    Args:
        query: (M, 2) places in the query.
        items: (K, M, 2) the matched places in K other images.
        matched: (K, M) bool, which of these are matches.
        tolerance: distance within which a match fits, in the units of the places.
        seed: number of the random samples.

    Example:
        >>> query = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 0.2]])
        >>> turned = torch.stack([2 - query[:, 1], query[:, 0]], dim=1)  # by 90 degrees, and moved
        >>> turned[4] = 9.0
        >>> found = verify_affine(query, turned[None], torch.ones(1, 5, dtype=torch.bool), 0.1)
        >>> found.inliers.tolist(), (found.maps[0].round(decimals=3) + 0.0).tolist()
        ([[True, True, True, True, False]], [[0.0, 1.0], [-1.0, 0.0], [2.0, 0.0]])
    """
    count, size = matched.shape
    inliers, maps = torch.zeros(count, size, dtype=torch.bool), torch.zeros(count, 3, 2)
    enough = (matched.sum(1) >= LEAST).nonzero()[:, 0]
    if not len(enough):
        return Verified(inliers, maps)
    order = matched[enough].int().argsort(dim=1, descending=True, stable=True)  # the matches first
    order = order[:, : int(matched.sum(1).max())]
    kept, rows = matched[enough].gather(1, order), torch.arange(len(enough))
    places = torch.cat([query, torch.ones(size, 1)], dim=1)[order]  # (K', M', 3)
    others = items[enough[:, None], order]  # (K', M', 2)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(len(enough), HYPOTHESES, LEAST, generator=generator) * kept.sum(1)[:, None, None]
    first, second = (side[rows[:, None, None], drawn.long()] for side in (places, others))  # (K', H, 3, 3 and 2)
    is_line = torch.linalg.det(first).abs() < tolerance**2  # or a match twice
    first[is_line] = torch.eye(3)
    tried = torch.linalg.solve(first, second)  # (K', H, 3, 2)
    fits = _fitting(places[:, None], others[:, None], tried, tolerance) & kept[:, None] & ~is_line[..., None]
    best = fits.sum(2).argmax(1)
    found, fitted = fits[rows, best], tried[rows, best]
    again = _least_squares(places, others, found, fitted)
    wider = _fitting(places, others, again, tolerance) & kept
    is_better = wider.sum(1) > found.sum(1)
    found[is_better], fitted[is_better] = wider[is_better], again[is_better]
    inliers[enough] = torch.zeros(len(enough), size, dtype=torch.bool).scatter(1, order, found)
    maps[enough] = _least_squares(places, others, found, fitted)
    return Verified(inliers, maps)


def _fitting(places: Tensor, items: Tensor, maps: Tensor, tolerance: float) -> Tensor:
    """Return which of the places (..., M, 3) a map (..., 3, 2) brings near the others (..., M, 2), if it is allowed."""
    areas = torch.linalg.det(maps[..., :2, :])
    is_allowed = (areas > 1 / LARGEST) & (areas < LARGEST)
    return ((places @ maps - items).square().sum(-1) <= tolerance**2) & is_allowed[..., None]


def _least_squares(places: Tensor, items: Tensor, used: Tensor, otherwise: Tensor) -> Tensor:
    """Return the maps (K, 3, 2) with the smallest squared errors of the matches used (K, M), if there are enough."""
    weighted = places * used[..., None]  # (K, M, 3)
    gram = weighted.mT @ places + 1e-9 * torch.eye(3)
    enough = (used.sum(1) > LEAST)[:, None, None] & (torch.linalg.det(gram).abs() > 1e-9)[:, None, None]
    fitted = torch.linalg.solve(torch.where(enough, gram, torch.eye(3)), weighted.mT @ items)
    return torch.where(enough, fitted, otherwise)
