"""Exact k-means++ seeding in a few matrix products."""

import torch
from torch import Tensor
from torch.linalg import vecdot

from dmlkit.metrics.ranking.products import inner_products_into, largest_columns

BATCH = 2048  # candidates drawn from the same distances
SQUARABLE = 2**-40, 2**50  # largest coordinates of rows whose squares, and the rounding of these, float32 holds
BLOCK_ENTRIES = 2**24  # products held at once: 64 MB, whatever their shape; fewer rows slow thin products down by half


def kmeans_plus_plus(points: Tensor, clusters: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Choose ``clusters`` of the points (N, D), each with a probability proportional to D^2 = its squared distance to
    the nearest chosen so far (Arthur & Vassilvitskii, SODA 2007).

    One pass over the points per seed would take as long as all of k-means. Instead a batch of candidates is drawn
    from the distances of the last pass, and each is kept with probability D^2 now / D^2 then, which needs only the
    distances between candidates: rejection sampling, so the distribution is the same. The first of a batch is always
    kept, as nothing has changed since it was drawn: every round brings a seed, so there are fewer rounds than seeds.

    Args:
        points: whose squared distances their dtype holds; see `squarable`.
        clusters: how many seeds, at most N.
        generator: of the draws.

    Returns:
        nearest: (N,) int64, the seed (0..clusters-1) nearest to each point.
        seeds: (clusters,) int64, the points chosen. Where fewer points are distinct, some repeat others.
    """
    squared = torch.full((len(points),), torch.inf, dtype=points.dtype, device=points.device)
    nearest = torch.zeros(len(points), dtype=torch.int64, device=points.device)
    seeds = torch.randint(len(points), (1,), generator=generator).to(points.device)
    _fold(points, seeds, 0, squared, nearest)
    while len(seeds) < clusters:
        batch = _draw(squared, min(BATCH, len(seeds)), generator)
        if batch is None:
            rest = torch.ones_like(squared, dtype=torch.bool)
            rest[seeds] = False
            return nearest, torch.cat([seeds, rest.nonzero()[: clusters - len(seeds), 0]])
        kept = _accept(points[batch], squared[batch], generator)
        fresh = batch[kept][: clusters - len(seeds)]
        _fold(points, fresh, len(seeds), squared, nearest)
        seeds = torch.cat([seeds, fresh])
    return nearest, seeds


def squarable(points: Tensor) -> Tensor:
    """Points (N, D) as they are where their dtype holds the squares of their distances, else in float64 and in units of
    the largest coordinate: of one point of 1e30 among others near 1 float32 holds no square.

    Example:
        >>> squarable(torch.tensor([[1.0, 0.0]]))
        tensor([[1., 0.]])
        >>> squarable(torch.tensor([[1e30, 0.0], [1.0, 0.0]]))[0]
        tensor([1., 0.], dtype=torch.float64)
    """
    least, most = points.aminmax(dim=1)
    longest = torch.maximum(most, -least)
    if not longest.any():
        return points
    low, high = SQUARABLE
    if longest[longest > 0].min() >= low and longest.max() <= high:  # rows of zeros have exact squares
        return points
    return points.double() / longest.max()


def _draw(squared: Tensor, size: int, generator: torch.Generator) -> Tensor | None:
    """Points drawn with probabilities proportional to ``squared``; None where all are 0."""
    total = squared.cumsum(0, dtype=torch.float64)
    if total[-1] == 0:
        return None
    at = torch.rand(size, dtype=torch.float64, generator=generator).to(total.device) * total[-1]
    return torch.searchsorted(total, at, right=True).clamp(max=len(total) - 1)


def _accept(candidates: Tensor, then: Tensor, generator: torch.Generator) -> Tensor:
    """Which candidates (n, D) become seeds, one after the other: (n,) bool."""
    between = squared_distances_to(candidates, candidates).cpu()
    threshold = then.cpu() * torch.rand(len(candidates), generator=generator)
    now = then.cpu().clone()
    kept = torch.zeros(len(candidates), dtype=torch.bool)
    for i in range(len(candidates)):
        if i == 0 or now[i] > threshold[i]:
            kept[i] = True
            now = now.minimum(between[i])
    return kept.to(candidates.device)


def _fold(points: Tensor, seeds: Tensor, first: int, squared: Tensor, nearest: Tensor) -> None:
    """Update each point's nearest seed and squared distance in place by the seeds numbered from ``first``."""
    if len(seeds) == 0:
        return
    found, column = nearest_centroids(points, points[seeds])
    nearest.copy_(torch.where(found < squared, column + first, nearest))
    torch.minimum(squared, found, out=squared)


def nearest_centroids(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """The squared distance to the nearest of (k, D) centroids, and which it is: (n,), (n,) int64.

    Distances below the rounding of |x|^2 + |c|^2 are 0, so that a point chosen as a seed is not chosen again.

    Example:
        >>> nearest_centroids(torch.tensor([[1.0, 0.0]]), torch.tensor([[4.0, 4.0], [1.0, 2.0]]))
        (tensor([4.]), tensor([1]))
    """
    norms = vecdot(centroids, centroids)
    height = max(1, BLOCK_ENTRIES // len(centroids))
    products = points.new_empty(min(height, len(points)), len(centroids))  # once: new memory costs 0.4 of the product
    best: list[Tensor] = []
    columns: list[Tensor] = []
    for rows in points.split(height):
        scores = inner_products_into(rows, centroids, products)
        scores -= norms / 2
        columns.append(largest_columns(scores))
        best.append(scores.gather(1, columns[-1][:, None])[:, 0])
    column, own = torch.cat(columns), vecdot(points, points)
    squared = own - 2 * torch.cat(best)
    return squared.masked_fill(squared < 8 * torch.finfo(points.dtype).eps * (own + norms[column]), 0), column


def squared_distances_to(x: Tensor, y: Tensor) -> Tensor:
    """|x_i - y_j|^2 of (n, D) and (m, D), not below 0: (n, m)."""
    products = inner_products_into(x, y, x.new_empty(len(x), len(y)))
    return (x.square().sum(1)[:, None] + y.square().sum(1) - 2 * products).clamp(min=0)
