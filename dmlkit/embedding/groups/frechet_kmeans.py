"""k-means on a manifold: its centroids are Fréchet means, its nearest those of the manifold."""

from collections.abc import Callable

import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.numerics.frechet import frechet_mean
from dmlkit.metrics.kmeans import kmeans_plus_plus, squarable

ITERATIONS = 50  # of Lloyd's algorithm at most; 5 to 30 settle
ENTRIES = 2**22  # similarities of points and centroids held at once: 16 MB, and temporaries of distances


@torch.no_grad()
def frechet_kmeans(
    manifold: Manifold,
    points: Tensor,
    clusters: int,
    *,
    seed: int = 0,
    advance: Callable[[int], None] = lambda _: None,
) -> Tensor:
    """Lloyd's algorithm from the seeds of k-means++, which are drawn by the distances of features.

    Args:
        manifold: the geometry. Points go to the most similar centroid; by a dot product, which grows with the length of
            a centroid, to the nearest.
        points: (N, D).
        clusters: K, from 1 to N.
        seed: of the seeds.
        advance: told of N / 50 points after each iteration, of which there are 50 at most.

    Returns:
        (N,) int64 in 0..K-1; a cluster that becomes empty takes the point farthest from its own centroid.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> found = frechet_kmeans(Euclidean(1), torch.tensor([[0.0], [0.2], [9.0], [9.2]]), 2)
        >>> (found == found[0]).tolist()
        [True, True, False, False]
    """
    generator = torch.Generator().manual_seed(seed)
    features = manifold.to_features(points).contiguous()
    scaled = squarable(features)
    if scaled is not features:  # then distances on the manifold need float64 as well
        points = points.double()
    assignments, _ = kmeans_plus_plus(scaled, clusters, generator)
    centroids = points.new_empty(clusters, points.shape[1])
    changed = torch.ones(clusters, dtype=torch.bool)
    for _ in range(ITERATIONS):
        order = assignments.argsort(stable=True)
        members = order.split(assignments.bincount(minlength=clusters).tolist())
        for cluster in changed.nonzero()[:, 0].tolist():
            if len(members[cluster]):
                centroids[cluster] = frechet_mean(manifold, points[members[cluster]]).to(points.dtype)
        found, similarity = _nearest(manifold, points, centroids)
        _fill_empty(found, similarity, clusters)
        moved = found != assignments
        changed = torch.zeros(clusters, dtype=torch.bool)
        changed[torch.cat([assignments[moved], found[moved]])] = True
        assignments = found
        advance(len(points) // ITERATIONS)
        if not moved.any():
            break
    return assignments


def _nearest(manifold: Manifold, points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    height = max(1, ENTRIES // len(centroids))
    is_dot = manifold.similarity_name == "dot"
    alike = (
        -manifold.distance(block, centroids) if is_dot else manifold.similarity(block, centroids)
        for block in points.split(height)
    )
    blocks = [block.max(1) for block in alike]
    return torch.cat([block.indices for block in blocks]), torch.cat([block.values for block in blocks])


def _fill_empty(assignments: Tensor, similarity: Tensor, clusters: int) -> None:
    """Give empty clusters the points that are farthest from their centroids, and not alone with them."""
    sizes = assignments.bincount(minlength=clusters)
    empty = (sizes == 0).nonzero()[:, 0].tolist()
    for row in similarity.argsort().tolist() if empty else ():
        if sizes[assignments[row]] > 1:
            sizes[assignments[row]] -= 1
            assignments[row] = cluster = empty.pop()
            sizes[cluster] = 1
            if not empty:
                return
