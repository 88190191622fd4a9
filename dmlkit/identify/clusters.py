"""Clusters of images: ``dmlkit cluster``."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dmlkit.errors import UserError, counted
from dmlkit.files.outputs import write_table
from dmlkit.identify.duplicates import picture_of
from dmlkit.identify.page import Shelf
from dmlkit.manifolds.base import Manifold, frechet_mean
from dmlkit.metrics.clustering import NmiConfig, kmeans_plus_plus, squarable
from dmlkit.nearest.near_pairs import check_reachable, complete_groups, connected_graph, near_pairs, neighbors_of
from dmlkit.vectors.points import PointsInMemory, separator_of

Method = Literal["kmeans", "agglomerative", "hdbscan"]
NEIGHBORS = 15  # of the graph
SMALLEST = 5  # images of a cluster of HDBSCAN, as scikit-learn has it
NOISE = -1
MOST_PICTURES = 12  # of a cluster on a page


@dataclass(frozen=True)
class Clusters:
    """Clusters, the largest first."""

    collection: PointsInMemory
    assignments: Tensor  # (N,) int64, cluster of each image from 0; `NOISE` for images in none

    @cached_property
    def members(self) -> list[Tensor]:
        """Rows of each cluster, the medoid first: the row with the greatest sum of similarities to all of them."""
        ordered: list[Tensor] = []
        for cluster in range(int(self.assignments.max()) + 1):
            rows = (self.assignments == cluster).nonzero()[:, 0]
            sums = similarity_sums(self.collection.manifold, self.collection.points[rows])
            ordered.append(rows[sums.argsort(descending=True, stable=True)])
        return ordered

    @property
    def noise(self) -> int:
        """Number of images in no cluster."""
        return int((self.assignments == NOISE).sum())

    @cached_property
    def separator(self) -> str | None:
        """Separator of several labels per image; None if each has one."""
        return separator_of(self.collection)

    def majorities(self) -> list[tuple[str, int] | None]:
        """Return the most frequent label of each cluster and its number of images; None without labels.

        An image with several labels counts for each of them.
        """
        labels = self.collection.labels
        texts = ([label for row in rows.tolist() if (label := labels[row]) is not None] for rows in self.members)
        named = texts
        if self.separator is not None:
            named = ([name for text in members for name in text.split(self.separator)] for members in texts)
        return [Counter(sorted(names)).most_common(1)[0] if names else None for names in named]

    def purity(self) -> float | None:
        """Return the share of labeled images with the most frequent label of their cluster; None without labels."""
        labels = self.collection.labels
        labelled = sum(labels[row] is not None for row in (self.assignments >= 0).nonzero()[:, 0].tolist())
        if not labelled:
            return None
        return sum(0 if majority is None else majority[1] for majority in self.majorities()) / labelled

    def nmi(self) -> float | None:
        """Return the normalized mutual information with the labels, over labeled images in clusters.

        It is None without labels, or if an image may have several.
        """
        if self.separator is not None:
            return None
        _, codes = self.collection.class_codes()
        is_counted = (codes >= 0) & (self.assignments >= 0)
        return NmiConfig().agreement(codes[is_counted], self.assignments[is_counted]) if is_counted.any() else None

    def write(self, path: Path) -> None:
        """Write a CSV table: one row per image, by cluster from 1, the medoid first; noise last; with their boxes."""
        paths, labels = self.collection.paths, self.collection.labels
        listed: list[tuple[int | str, int, int]] = []  # cluster, row, and whether it is the medoid
        for number, members in enumerate(self.members, start=1):
            listed += [(number, row, int(rank == 0)) for rank, row in enumerate(members.tolist())]
        listed += [("", row, 0) for row in (self.assignments == NOISE).nonzero()[:, 0].tolist()]
        rows = ((number, paths[row], labels[row] or "", is_medoid) for number, row, is_medoid in listed)
        columns = ("cluster", "path", "label", "is_medoid")
        write_table(path, columns, rows, [self.collection.boxes[row] for _, row, _ in listed])

    def shelves(self) -> Iterator[Shelf]:
        """Yield a row of pictures per cluster: its medoid, then the images most similar to all others."""
        for number, (rows, majority) in enumerate(zip(self.members, self.majorities(), strict=True), start=1):
            images = counted(len(rows), "image", "images")
            lines = [f"cluster {number}, {images}", *([] if majority is None else [f"{majority[1]} are {majority[0]}"])]
            shown = rows[:MOST_PICTURES].tolist()
            pictures = [picture_of(self.collection, row, lines if not rank else []) for rank, row in enumerate(shown)]
            yield Shelf(pictures[0], pictures[1:])


def cluster(
    collection: PointsInMemory,
    *,
    clusters: int | None = None,
    threshold: float | None = None,
    method: Method | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Clusters:
    """Cluster images.

    Args:
        clusters: K; for ``kmeans`` and ``agglomerative``.
        threshold: a similarity. In a cluster of ``agglomerative`` every two are as alike; ``hdbscan`` splits none that
            are as alike as this.
        method: ``kmeans`` with Fréchet means, the default with ``clusters``; ``agglomerative``, the default with
            ``threshold``: complete linkage for a threshold, and for K Ward's along the graph of the 15 nearest, in the
            tangent space at the origin (average linkage along that graph chains: purity 0.08 on 81 products, Ward's
            0.76); ``hdbscan`` on the graph.
    """
    method = clustering_method(clusters, threshold, method)
    _check_sizes(collection, clusters, threshold, method)
    manifold, points = collection.manifold, collection.points
    if method == "kmeans":
        assert clusters is not None
        return Clusters(collection, _by_size(frechet_kmeans(manifold, points, clusters, advance=advance)))
    if threshold is not None and method == "agglomerative":
        pairs = near_pairs(manifold, points, None, threshold, advance=advance)
        assigned = torch.arange(len(collection))
        for rows in complete_groups(pairs, len(collection)):
            assigned[rows] = rows[0]
        return Clusters(collection, _by_size(assigned))
    neighbors = neighbors_of(manifold, points, min(NEIGHBORS, len(collection) - 1), advance=advance)
    graph, origin = connected_graph(manifold, points, neighbors)
    if clusters is not None:
        from sklearn.cluster import AgglomerativeClustering

        model: Any = AgglomerativeClustering(clusters, connectivity=graph, linkage="ward")
        assigned = torch.from_numpy(model.fit_predict(manifold.to_features(points).detach().double().numpy())).long()
    else:
        from sklearn.cluster import HDBSCAN

        model = HDBSCAN(min_cluster_size=SMALLEST, metric="precomputed")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of 1.9: it may change the graph, which nobody reads again
            assigned = torch.from_numpy(model.fit_predict(graph)).long()
        if threshold is not None:  # cluster_selection_epsilon ends in a TypeError with NumPy 2.4: scikit-learn 33219
            groups = model.dbscan_clustering(origin - threshold, min_cluster_size=SMALLEST)
            assigned = merged(assigned, torch.from_numpy(groups).long())
    return Clusters(collection, _by_size(assigned))


def merged(clusters: Tensor, groups: Tensor) -> Tensor:
    """Merge the clusters that have images of one group; images of the group that are in no cluster join them.

    Args:
        clusters: (N,) int64, cluster of each image; `NOISE` for none.
        groups: (N,) int64 in 0..G-1, group of each image; `NOISE` for none. A cluster with images of several groups has
            all images of these.

    Example:
        >>> merged(torch.tensor([0, 1, -1, 2, 2, -1]), torch.tensor([0, 0, 0, 1, 2, 3])).tolist()
        [0, 0, 0, 2, 2, -1]
    """
    is_grouped, none = groups != NOISE, len(clusters)
    names = torch.where(clusters == NOISE, none, clusters)
    least = torch.full((int(groups.max()) + 1,), none).scatter_reduce(0, groups[is_grouped], names[is_grouped], "amin")
    names[is_grouped] = least[groups[is_grouped]]
    return torch.where(names == none, NOISE, names)


def clustering_method(clusters: int | None, threshold: float | None, method: Method | None) -> Method:
    """Return the method that `cluster` takes."""
    method = method or ("agglomerative" if clusters is None else "kmeans")
    command = f"cluster --method {method}"
    if clusters is not None and threshold is not None:
        raise UserError(f"{command}: got both -k and --threshold; use only one of them")
    if method == "kmeans" and clusters is None:
        raise UserError(f"{command}: expected -k COUNT; --threshold applies only to agglomerative and hdbscan")
    if method == "agglomerative" and clusters is None and threshold is None:
        raise UserError("cluster: expected -k COUNT or --threshold SIMILARITY; --method hdbscan needs neither")
    if method == "hdbscan" and clusters is not None:
        raise UserError(f"{command}: hdbscan determines the number of clusters itself; remove -k")
    is_ours = method == "kmeans" or (method == "agglomerative" and clusters is None)
    if not is_ours and find_spec("sklearn") is None:
        raise UserError(f"{command}: needs scikit-learn; install it with: pip install 'dmlkit[cluster]'")
    return method


def _check_sizes(collection: PointsInMemory, clusters: int | None, threshold: float | None, method: Method) -> None:
    if clusters is not None and not 1 <= clusters <= len(collection):
        raise UserError(f"-k {clusters}: expected 1 to {len(collection)}, the images of {collection.source}")
    minimum = {"kmeans": 1, "agglomerative": 2, "hdbscan": SMALLEST + 1}[method]
    if len(collection) < minimum:
        raise UserError(
            f"cluster --method {method}: {collection.source} has {len(collection)} images; expected at least {minimum}"
        )
    if threshold is not None:
        check_reachable(collection.manifold, threshold)


def _by_size(assigned: Tensor) -> Tensor:
    """Renumber clusters from 0, the largest first; of equally large ones that with the first row."""
    is_kept = assigned >= 0
    names, codes, sizes = assigned[is_kept].unique(return_inverse=True, return_counts=True)
    first = torch.full((len(names),), len(assigned)).scatter_reduce(0, codes, is_kept.nonzero()[:, 0], "amin")
    order = (-sizes * len(assigned) + first).argsort()
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order))
    numbered = torch.full_like(assigned, NOISE)
    numbered[is_kept] = number[codes]
    return numbered


ROWS = 1024  # distances of as many points to all are held at once: 82 MB in float64 for a cluster of 10 000


@torch.no_grad()
def similarity_sums(manifold: Manifold, points: Tensor) -> Tensor:
    """Return the sum of the similarities of each point (n, D) to all points, in float64; the medoid has the largest.

    For inner products it is the product with the sum, without a loop over pairs.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> similarity_sums(Euclidean(1), torch.tensor([[0.0], [1.0], [3.0]])).tolist()
        [-4.0, -3.0, -5.0]
    """
    points = points.double()
    if manifold.similarity_name.endswith("distance"):
        return torch.cat([manifold.similarity(block, points).sum(1) for block in points.split(ROWS)])
    vectors = manifold.product_vectors(points)
    return vectors @ vectors.sum(0)


ITERATIONS = 50  # of Lloyd's algorithm at most; 5 to 30 settle
ENTRIES = 2**22  # similarities of points and centroids held at once: 16 MB, and temporaries of distances


@torch.no_grad()
def frechet_kmeans(
    manifold: Manifold, points: Tensor, clusters: int, *, advance: Callable[[int], None] = lambda _: None
) -> Tensor:
    """Run Lloyd's algorithm from the seeds of k-means++, which are drawn by the distances of features.

    Args:
        manifold: the geometry. Points go to the most similar centroid; by a dot product, which grows with the length of
            a centroid, to the nearest.

    Returns:
        (N,) int64 in 0..K-1; a cluster that becomes empty takes the point farthest from its own centroid.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> assignments = frechet_kmeans(Euclidean(1), torch.tensor([[0.0], [0.2], [9.0], [9.2]]), 2)
        >>> (assignments == assignments[0]).tolist()
        [True, True, False, False]
    """
    generator = torch.Generator().manual_seed(0)
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
        closest, similarity = _nearest(manifold, points, centroids)
        _fill_empty(closest, similarity, clusters)
        moved = closest != assignments
        changed = torch.zeros(clusters, dtype=torch.bool)
        changed[torch.cat([assignments[moved], closest[moved]])] = True
        assignments = closest
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
    """Assign to empty clusters the points farthest from their centroids, unless they are alone with these."""
    sizes = assignments.bincount(minlength=clusters)
    empty = (sizes == 0).nonzero()[:, 0].tolist()
    for row in similarity.argsort().tolist() if empty else ():
        if sizes[assignments[row]] > 1:
            sizes[assignments[row]] -= 1
            assignments[row] = cluster = empty.pop()
            sizes[cluster] = 1
            if not empty:
                return
