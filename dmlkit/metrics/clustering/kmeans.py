"""k-means with k-means++ seeds, quick where clusters are many and small."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dmlkit.metrics.base import Points
from dmlkit.metrics.clustering.seeding import kmeans_plus_plus, nearest_centroids, squarable


@dataclass(frozen=True)
class KMeansOptions:
    """At most ``iterations`` of Lloyd's algorithm, the best of ``restarts``, reproducible by ``seed``."""

    iterations: int = 20
    restarts: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Clustering:
    """The cluster of each point, (N,) int64 in 0..k-1, and the sum of squared distances to the centroids, in the
    units of `squarable`."""

    assignments: Tensor
    inertia: float


def kmeans(points: Tensor, clusters: int, options: KMeansOptions) -> Clustering:
    """Cluster points (N, D) into ``clusters`` groups by Euclidean distance.

    Seeding leaves every point assigned, so it takes the place of the first assignment. Afterwards a point whose
    centroid stayed put is compared only with the centroids that moved, which changes nothing but the time. A cluster
    that becomes empty is given the point farthest from its centroid.

    Raises:
        ValueError: fewer points than clusters.

    Example:
        >>> result = kmeans(torch.tensor([[0.0], [0.2], [9.0], [9.2]]), 2, KMeansOptions())
        >>> (result.assignments == result.assignments[0]).tolist(), round(result.inertia, 4)
        ([True, True, False, False], 0.04)
    """
    if not 1 <= clusters <= len(points):
        raise ValueError(f"kmeans: expected between 1 and {len(points)} clusters, got {clusters}")
    generator = torch.Generator().manual_seed(options.seed)
    points = squarable(points)
    runs = [_lloyd(points, clusters, options.iterations, generator) for _ in range(options.restarts)]
    return min(runs, key=lambda run: run.inertia)


def class_clusters(points: Points, options: KMeansOptions) -> Tensor:
    """The k-means cluster of each point, k = C, on its coordinates: (N,) int64; computed once per options."""
    if options not in points.found:
        points.found[options] = kmeans(points.embeddings, int(points.labels.max()) + 1, options).assignments
    return points.found[options]


def _lloyd(points: Tensor, clusters: int, iterations: int, generator: torch.Generator) -> Clustering:
    assignments, seeds = kmeans_plus_plus(points, clusters, generator)
    centroids = points[seeds]
    squared = (points - centroids[assignments]).square().sum(1)
    for _ in range(iterations):
        means = _means(points, assignments, clusters, squared)
        previous = assignments.clone()
        _assign(points, means, (means != centroids).any(1), assignments, squared)
        centroids = means
        if torch.equal(previous, assignments):
            break
    return Clustering(assignments, float(squared.sum(dtype=torch.float64)))


def _means(points: Tensor, assignments: Tensor, clusters: int, squared: Tensor) -> Tensor:
    """The centroid of each cluster (k, D); for an empty one the point farthest from its own centroid."""
    sizes = assignments.bincount(minlength=clusters)
    sums = points.new_zeros(clusters, points.shape[1]).index_add_(0, assignments, points)
    means = sums / sizes.clamp(min=1)[:, None]
    empty = (sizes == 0).nonzero()[:, 0]
    means[empty] = points[squared.topk(len(empty)).indices]
    return means


def _assign(points: Tensor, centroids: Tensor, moved: Tensor, assignments: Tensor, squared: Tensor) -> None:
    """Update each point's nearest centroid and squared distance in place, after some centroids moved."""
    shifted = moved[assignments]
    changed = moved.nonzero()[:, 0]
    stayed = (~shifted).nonzero()[:, 0]
    if len(changed) and len(stayed):
        found, column = nearest_centroids(points[stayed], centroids[changed])
        closer = found < squared[stayed]
        squared[stayed] = torch.where(closer, found, squared[stayed])
        assignments[stayed] = torch.where(closer, changed[column], assignments[stayed])
    if len(stayed) < len(points):
        rows = shifted.nonzero()[:, 0]
        squared[rows], assignments[rows] = nearest_centroids(points[rows], centroids)
