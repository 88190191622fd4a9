"""Clustering metrics: agreement of k-means clusters of the embeddings with the labels (NMI, AMI, ARI, F1)."""

from abc import abstractmethod
from typing import ClassVar, Literal, NamedTuple

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor
from torch.linalg import vecdot

from dmlkit.manifolds.products import inner_products_into
from dmlkit.metrics.base import MetricConfig, Points, log_binomial


class ClusteringConfig(MetricConfig, frozen=True, abstract=True):
    """Base of metrics that compare the classes with as many k-means clusters."""

    iterations: PositiveInt = 20
    """Maximum number of iterations of Lloyd's algorithm; it stops earlier when no assignment changes."""
    restarts: PositiveInt = 1
    """Number of clusterings; the one with the least squared distance is used."""
    seed: NonNegativeInt = 0
    """Seed of the clustering."""
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        key = "kmeans", self.iterations, self.restarts, self.seed
        if key not in points.shared:
            options = {"iterations": self.iterations, "restarts": self.restarts, "seed": self.seed}
            points.shared[key] = kmeans(points.embeddings, int(points.labels.max()) + 1, **options).assignments
        return {self.key: self.agreement(points.labels, points.shared[key])}

    @abstractmethod
    def agreement(self, labels: Tensor, clusters: Tensor) -> float:
        """Compute the metric of two partitions (N,) int64; 1 if they are equal."""


class Overlaps(NamedTuple):
    """Sizes of the parts of two partitions of N points, and of their M nonempty intersections, int64."""

    classes: Tensor  # (C,)
    clusters: Tensor  # (K,)
    both: Tensor  # (M,)
    of_class: Tensor  # (M,), size of the class of each intersection
    of_cluster: Tensor  # (M,)

    def information(self) -> float:
        """Return the mutual information of the partitions, in nats."""
        total = self.both.sum()
        gain = (total * self.both / (self.of_class.double() * self.of_cluster)).log()
        return max(0.0, float((self.both * gain).sum() / total))

    def mean_entropy(self) -> float:
        """Return the mean of the entropies of the partitions, in nats."""
        shares = (sizes.double() / sizes.sum() for sizes in (self.classes, self.clusters))
        return sum(float(-(share * share.log()).sum()) for share in shares) / 2

    def pairs(self) -> tuple[int, int, int]:
        """Return how many pairs of points are of the same class, of the same cluster, and of both."""
        same_class, same_cluster, both = (int((sizes * (sizes - 1) // 2).sum()) for sizes in self[:3])
        return same_class, same_cluster, both


def overlaps(labels: Tensor, clusters: Tensor) -> Overlaps:
    """Count the points that two partitions (N,) int64 have in each part, and in both."""
    (_, rows, of_rows), (_, columns, of_columns) = (
        parts.unique(return_inverse=True, return_counts=True) for parts in (labels, clusters)
    )
    cells, both = (rows * len(of_columns) + columns).unique(return_counts=True)
    return Overlaps(of_rows, of_columns, both, of_rows[cells // len(of_columns)], of_columns[cells % len(of_columns)])


class NmiConfig(ClusteringConfig, frozen=True):
    r"""NMI, the normalized mutual information of the classes and as many k-means clusters; 1 if they agree.

    .. math:: \frac{I(Y; Z)}{(H(Y) + H(Z)) / 2}

    Example:
        >>> round(NmiConfig().agreement(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 0])), 6)
        1.0
    """

    name: Literal["nmi"] = "nmi"
    definition: ClassVar[str] = "nmi: mutual information of classes and k-means clusters / mean of their entropies"

    def agreement(self, labels: Tensor, clusters: Tensor) -> float:
        contingency = overlaps(labels, clusters)
        entropy = contingency.mean_entropy()
        return contingency.information() / entropy if entropy else 1.0


class AmiConfig(ClusteringConfig, frozen=True):
    r"""AMI, the mutual information adjusted for chance: 0 for any number of random clusters (Vinh et al., JMLR 2010).

    .. math:: \frac{I(Y; Z) - E[I]}{(H(Y) + H(Z)) / 2 - E[I]}

    Example:
        >>> round(AmiConfig().agreement(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 0])), 6)
        1.0
    """

    name: Literal["ami"] = "ami"
    definition: ClassVar[str] = "ami: nmi adjusted for chance; 0 for random clusters"

    def agreement(self, labels: Tensor, clusters: Tensor) -> float:
        contingency = overlaps(labels, clusters)
        chance = expected_information(contingency.classes, contingency.clusters)
        room = contingency.mean_entropy() - chance
        return (contingency.information() - chance) / room if abs(room) > 1e-15 else 1.0


def expected_information(classes: Tensor, clusters: Tensor) -> float:
    """Compute the mean mutual information, in nats, of random partitions of these sizes (Vinh et al. 2010, eq. 24a).

    Few of the sizes (C,) and (K,) are distinct, at most sqrt(2N), so each pair of sizes is summed once. scikit-learn
    sums over all pairs of parts: more than 60 s for 60 502 points in 11 316 classes.
    """
    total = int(classes.sum())
    a, times_a = classes.unique(return_counts=True)
    b, times_b = clusters.unique(return_counts=True)
    b, information = b.double(), 0.0
    for size, times in zip(a.tolist(), times_a.tolist(), strict=True):
        n = torch.arange(1, size + 1, dtype=torch.float64, device=b.device)[:, None]  # (n, K)
        possible = (n <= b) & (n >= size + b - total)
        n = torch.where(possible, n, b.minimum(torch.full_like(b, size)))
        log_probability = (
            log_binomial(b, n)
            + log_binomial(total - b, size - n)
            - log_binomial(torch.tensor(float(total)), torch.tensor(float(size)))
        )
        terms = n / total * (total * n / (size * b)).log() * log_probability.exp()
        information += times * float((times_b * terms.masked_fill(~possible, 0).sum(0)).sum())
    return information


class AriConfig(ClusteringConfig, frozen=True):
    r"""ARI, the share of pairs on which classes and clusters agree, adjusted for chance (Hubert & Arabie 1985).

    .. math:: \frac{S - E}{(A + B) / 2 - E}, \quad S = \sum_{ij} \binom{n_{ij}}{2},\ A = \sum_i \binom{a_i}{2},\
        B = \sum_j \binom{b_j}{2},\ E = A B / \binom{N}{2}

    Example:
        >>> round(AriConfig().agreement(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 2])), 6)
        0.571429
    """

    name: Literal["ari"] = "ari"
    definition: ClassVar[str] = "ari: pairs that classes and k-means clusters agree on, adjusted for chance"

    def agreement(self, labels: Tensor, clusters: Tensor) -> float:
        same_class, same_cluster, both = overlaps(labels, clusters).pairs()
        chance = same_class * same_cluster / max(1, len(labels) * (len(labels) - 1) // 2)
        room = (same_class + same_cluster) / 2 - chance
        return (both - chance) / room if room else 1.0


class F1Config(ClusteringConfig, frozen=True):
    r"""F1 score of "same cluster" as a prediction of "same class", over all pairs of points.

    .. math:: \frac{2 \sum_{ij} \binom{n_{ij}}{2}}{\sum_i \binom{a_i}{2} + \sum_j \binom{b_j}{2}}

    It is 1 if no class and no cluster has two points.

    Example:
        >>> F1Config().agreement(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 1]))
        0.4
    """

    name: Literal["f1"] = "f1"
    definition: ClassVar[str] = "f1: F1 over pairs of points, same k-means cluster against same class"

    def agreement(self, labels: Tensor, clusters: Tensor) -> float:
        same_class, same_cluster, both = overlaps(labels, clusters).pairs()
        return 2 * both / (same_class + same_cluster) if same_class + same_cluster else 1.0


class Clustering(NamedTuple):
    """Result of k-means."""

    assignments: Tensor  # (N,) int64 in 0..k-1, the cluster of each point
    inertia: float  # sum of squared distances to the centroids, in the unit of `squarable`


def kmeans(points: Tensor, clusters: int, *, iterations: int = 20, restarts: int = 1, seed: int = 0) -> Clustering:
    """Cluster points (N, D) into ``clusters`` groups by Euclidean distance.

    Seeding assigns every point, so it replaces the first assignment. Later a point whose centroid did not move is
    compared only with the centroids that moved, which saves time and does not change the result. A cluster that becomes
    empty gets the point farthest from its centroid.

    Args:
        iterations: maximum number of iterations of Lloyd's algorithm.
        restarts: number of clusterings; the one with the least inertia is returned.
    """
    if not 1 <= clusters <= len(points):
        raise ValueError(f"kmeans: expected between 1 and {len(points)} clusters, got {clusters}")
    generator = torch.Generator().manual_seed(seed)
    points = squarable(points)
    runs = [_lloyd(points, clusters, iterations, generator) for _ in range(restarts)]
    return min(runs, key=lambda run: run.inertia)


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
    """Compute the centroid of each cluster, (k, D); an empty cluster gets the point farthest from its own centroid."""
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
        new_squared, column = nearest_centroids(points[stayed], centroids[changed])
        closer = new_squared < squared[stayed]
        squared[stayed] = torch.where(closer, new_squared, squared[stayed])
        assignments[stayed] = torch.where(closer, changed[column], assignments[stayed])
    if len(stayed) < len(points):
        rows = shifted.nonzero()[:, 0]
        squared[rows], assignments[rows] = nearest_centroids(points[rows], centroids)


BATCH = 2048  # candidates drawn from the same distances
SQUARABLE = 2**-40, 2**50  # largest coordinates of rows whose squares, with their rounding, float32 can represent
FAR = 100.0  # square of the distance of the mean from the origin, in units of the points' mean square from their mean
BLOCK_ENTRIES = 2**24  # products held at once: 64 MB for any shape; with fewer rows thin products take twice as long


def kmeans_plus_plus(points: Tensor, clusters: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Choose seeds among points (N, D) by k-means++ (Arthur & Vassilvitskii, SODA 2007).

    Each seed is drawn with a probability proportional to D^2, the squared distance to the nearest seed so far. One
    pass over the points per seed would take as long as all of k-means. Instead a batch of candidates is drawn from the
    distances of the last pass, and each is kept with probability D^2 now / D^2 then, which needs only the distances
    between candidates. This is rejection sampling, so the distribution is the same. The first candidate of a batch is
    always kept, because no distance has changed since it was drawn: there are at most as many rounds as seeds.

    Args:
        points: points whose squared distances their dtype can represent; see `squarable`.

    Returns:
        nearest: (N,) int64, the seed (0..clusters-1) nearest to each point.
        seeds: (clusters,) int64, the chosen points. If fewer points are distinct, some repeat others.
    """
    squared = torch.full((len(points),), torch.inf, dtype=points.dtype, device=points.device)
    nearest = torch.zeros(len(points), dtype=torch.int64, device=points.device)
    seeds = torch.randint(len(points), (1,), generator=generator).to(points.device)
    _fold(points, seeds, 0, squared, nearest)
    while len(seeds) < clusters:
        batch = _draw(squared, min(BATCH, len(seeds)), generator)
        if batch is None:
            unchosen = torch.ones_like(squared, dtype=torch.bool)
            unchosen[seeds] = False
            return nearest, torch.cat([seeds, unchosen.nonzero()[: clusters - len(seeds), 0]])
        accepted = _accept(points[batch], squared[batch], generator)
        fresh = batch[accepted][: clusters - len(seeds)]
        _fold(points, fresh, len(seeds), squared, nearest)
        seeds = torch.cat([seeds, fresh])
    return nearest, seeds


def squarable(points: Tensor) -> Tensor:
    """Move or rescale points (N, D) if products in their dtype do not give the squares of their distances.

    Float32 cannot represent the square of 1e30: such points are converted to float64 and divided by the largest
    coordinate. The products of points that are far from the origin compared with their distances cancel: they are moved
    to their mean. Other points are returned unchanged.
    """
    smallest, largest = points.aminmax(dim=1)
    longest = torch.maximum(largest, -smallest)
    if not longest.any():
        return points
    low, high = SQUARABLE
    if longest[longest > 0].min() >= low and longest.max() <= high:  # rows of zeros have exact squares
        mean = points.mean(0)
        offset = vecdot(mean, mean)
        if vecdot(points, points).mean() - offset >= offset / FAR:
            return points
        return (points.double() - mean).to(points.dtype)
    return points.double() / longest.max()


def _draw(squared: Tensor, size: int, generator: torch.Generator) -> Tensor | None:
    """Draw points with probabilities proportional to ``squared``; return None if all are 0."""
    total = squared.cumsum(0, dtype=torch.float64)
    if total[-1] == 0:
        return None
    draws = torch.rand(size, dtype=torch.float64, generator=generator).to(total.device) * total[-1]
    return torch.searchsorted(total, draws, right=True).clamp(max=len(total) - 1)


def _accept(candidates: Tensor, then: Tensor, generator: torch.Generator) -> Tensor:
    """Decide one after the other which candidates (n, D) become seeds, (n,) bool."""
    products = inner_products_into(candidates, candidates, candidates.new_empty(len(candidates), len(candidates)))
    norms = candidates.square().sum(1)
    between = (norms[:, None] + norms - 2 * products).clamp(min=0).cpu()
    threshold = then.cpu() * torch.rand(len(candidates), generator=generator)
    now = then.cpu().clone()
    accepted = torch.zeros(len(candidates), dtype=torch.bool)
    for i in range(len(candidates)):
        if i == 0 or now[i] > threshold[i]:
            accepted[i] = True
            now = now.minimum(between[i])
    return accepted.to(candidates.device)


def _fold(points: Tensor, seeds: Tensor, first: int, squared: Tensor, nearest: Tensor) -> None:
    """Update each point's nearest seed and squared distance in place by the seeds numbered from ``first``."""
    new_squared, column = nearest_centroids(points, points[seeds])
    nearest.copy_(torch.where(new_squared < squared, column + first, nearest))
    torch.minimum(squared, new_squared, out=squared)


def nearest_centroids(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the squared distance (n,) to the nearest of the centroids (k, D), and its index (n,) int64.

    Distances below the rounding error of |x|^2 + |c|^2 become 0, so that a seed is not chosen twice.
    """
    norms = vecdot(centroids, centroids)
    height = max(1, BLOCK_ENTRIES // len(centroids))
    products = points.new_empty(min(height, len(points)), len(centroids))  # once: new memory costs 0.4 of the product
    best: list[Tensor] = []
    columns: list[Tensor] = []
    for rows in points.split(height):
        scores = inner_products_into(rows, centroids, products)
        scores -= norms / 2
        # NumPy takes 3 us per row of 11 316; torch's takes 18
        columns.append(torch.from_numpy(scores.numpy().argmax(1)) if scores.is_cpu else scores.argmax(1))
        best.append(scores.gather(1, columns[-1][:, None])[:, 0])
    column, point_norms = torch.cat(columns), vecdot(points, points)
    squared = point_norms - 2 * torch.cat(best)
    return squared.masked_fill(squared < 8 * torch.finfo(points.dtype).eps * (point_norms + norms[column]), 0), column
