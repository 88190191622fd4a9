"""Clustering metrics: agreement of k-means clusters of the embeddings with the labels (NMI, AMI, ARI, F1)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from dmlkit.metrics.base import MetricConfig, Points, log_binomial
from dmlkit.metrics.kmeans import KMeansOptions, class_clusters


@dataclass(frozen=True)
class Contingency:
    """Contingency table of classes and clusters; empty overlaps are left out.

    Args:
        overlap: (M,) int64 >= 1; n_ij, number of items of class i in cluster j.
        of_class: (M,) int64; a_i, size of the class of each overlap.
        of_cluster: (M,) int64; b_j, size of the cluster of each overlap.
        classes: (C,) int64; all a_i.
        clusters: (K,) int64; all b_j.
        total: N, number of items.
    """

    overlap: Tensor
    of_class: Tensor
    of_cluster: Tensor
    classes: Tensor
    clusters: Tensor
    total: int

    @classmethod
    def of(cls, labels: Tensor, clusters: Tensor) -> "Contingency":
        """Count the overlaps of labels (N,) and clusters (N,).

        Example:
            >>> Contingency.of(torch.tensor([0, 0, 1]), torch.tensor([5, 6, 6])).overlap.tolist()
            [1, 1, 1]
        """
        _, i, a = labels.unique(return_inverse=True, return_counts=True)
        _, j, b = clusters.unique(return_inverse=True, return_counts=True)
        pairs, overlap = torch.stack([i, j]).unique(dim=1, return_counts=True)
        return cls(overlap, a[pairs[0]], b[pairs[1]], a, b, len(labels))

    def mutual_information(self) -> float:
        r"""Compute :math:`\sum_{ij} \frac{n_{ij}}{N} \log \frac{N n_{ij}}{a_i b_j}`, in nats."""
        share = self.overlap.double() / self.total
        ratio = self.overlap.double() * self.total / (self.of_class.double() * self.of_cluster)
        return max(0.0, float((share * ratio.log()).sum()))

    def mean_entropy(self) -> float:
        """Compute the arithmetic mean of the entropies of classes and clusters, in nats."""
        return (_entropy(self.classes, self.total) + _entropy(self.clusters, self.total)) / 2

    def expected_information(self) -> float:
        """Compute the mean mutual information of random partitions with these sizes (Vinh et al., JMLR 2010, eq. 24a).

        It depends only on sizes, and few sizes are distinct (at most sqrt(2N)), so each pair of sizes is summed once.
        """
        a, times_a = self.classes.unique(return_counts=True)
        b, times_b = self.clusters.unique(return_counts=True)
        total = 0.0
        for size, times in zip(a.tolist(), times_a.tolist(), strict=True):
            total += times * float((times_b * _expected_information(size, b.double(), self.total)).sum())
        return total


def _entropy(sizes: Tensor, total: int) -> float:
    share = sizes.double() / total
    return float(-(share * share.log()).sum())


def _expected_information(a: int, b: Tensor, total: int) -> Tensor:
    """Compute the summands (K,) of one class size ``a`` and cluster sizes (K,)."""
    n = torch.arange(1, a + 1, dtype=torch.float64, device=b.device)[:, None]  # (n, K)
    possible = (n <= b) & (n >= a + b - total)
    n = torch.where(possible, n, b.minimum(torch.full_like(b, a)))
    log_probability = (
        log_binomial(b, n)
        + log_binomial(total - b, a - n)
        - log_binomial(torch.tensor(float(total)), torch.tensor(float(a)))
    )
    terms = n / total * (total * n / (a * b)).log() * log_probability.exp()
    return terms.masked_fill(~possible, 0).sum(0)


class NmiConfig(MetricConfig, frozen=True):
    r"""NMI, the normalized mutual information of the classes and as many k-means clusters; 1 if they agree.

    .. math:: \frac{I(Y; Z)}{(H(Y) + H(Z)) / 2}
    """

    name: Literal["nmi"] = "nmi"
    iterations: PositiveInt = 20
    """Maximum number of iterations of Lloyd's algorithm; it stops earlier when no assignment changes."""
    restarts: PositiveInt = 1
    """Number of clusterings; the one with the least squared distance is used."""
    seed: NonNegativeInt = 0
    """Seed of the clustering."""
    key: ClassVar[str] = "nmi"
    definition: ClassVar[str] = "nmi: mutual information of classes and k-means clusters / mean of their entropies"
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        clusters = class_clusters(points, KMeansOptions(self.iterations, self.restarts, self.seed))
        return {"nmi": normalized_information(points.labels, clusters)}


def normalized_information(labels: Tensor, clusters: Tensor) -> float:
    """Compute mutual information / mean entropy of two partitions (N,); 1 if both have a single part.

    Example:
        >>> import torch
        >>> round(normalized_information(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 0])), 6)
        1.0
    """
    from sklearn.metrics import normalized_mutual_info_score

    return float(normalized_mutual_info_score(labels.cpu().numpy(), clusters.cpu().numpy()))


class AmiConfig(MetricConfig, frozen=True):
    r"""AMI, the mutual information adjusted for chance: 0 for any number of random clusters (Vinh et al., JMLR 2010).

    .. math:: \frac{I(Y; Z) - E[I]}{(H(Y) + H(Z)) / 2 - E[I]}
    """

    name: Literal["ami"] = "ami"
    iterations: PositiveInt = 20
    """Maximum number of iterations of Lloyd's algorithm; it stops earlier when no assignment changes."""
    restarts: PositiveInt = 1
    """Number of clusterings; the one with the least squared distance is used."""
    seed: NonNegativeInt = 0
    """Seed of the clustering."""
    key: ClassVar[str] = "ami"
    definition: ClassVar[str] = "ami: nmi adjusted for chance; 0 for random clusters"
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        clusters = class_clusters(points, KMeansOptions(self.iterations, self.restarts, self.seed))
        return {"ami": adjusted_information(points.labels, clusters)}


def adjusted_information(labels: Tensor, clusters: Tensor) -> float:
    """Compute the mutual information above chance / the maximum above chance; 1 if that maximum is 0.

    scikit-learn sums the expectation over all pairs of parts: more than 60 s for 60 502 points, 11 316 classes.

    Example:
        >>> import torch
        >>> round(adjusted_information(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 0])), 6)
        1.0
    """
    table = Contingency.of(labels, clusters)
    chance = table.expected_information()
    room = table.mean_entropy() - chance
    gain = table.mutual_information() - chance
    return gain / room if abs(room) > 1e-15 else 1.0


class AriConfig(MetricConfig, frozen=True):
    r"""ARI, the share of pairs on which classes and clusters agree, adjusted for chance (Hubert & Arabie 1985).

    .. math:: \frac{S - E}{(A + B) / 2 - E}, \quad S = \sum_{ij} \binom{n_{ij}}{2},\ A = \sum_i \binom{a_i}{2},\
        B = \sum_j \binom{b_j}{2},\ E = A B / \binom{N}{2}
    """

    name: Literal["ari"] = "ari"
    iterations: PositiveInt = 20
    """Maximum number of iterations of Lloyd's algorithm; it stops earlier when no assignment changes."""
    restarts: PositiveInt = 1
    """Number of clusterings; the one with the least squared distance is used."""
    seed: NonNegativeInt = 0
    """Seed of the clustering."""
    key: ClassVar[str] = "ari"
    definition: ClassVar[str] = "ari: pairs that classes and k-means clusters agree on, adjusted for chance"
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        clusters = class_clusters(points, KMeansOptions(self.iterations, self.restarts, self.seed))
        return {"ari": adjusted_rand(points.labels, clusters)}


def adjusted_rand(labels: Tensor, clusters: Tensor) -> float:
    """Compute the agreement above chance / the maximum above chance; 1 if that maximum is 0.

    Example:
        >>> import torch
        >>> round(adjusted_rand(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 2])), 6)
        0.571429
    """
    from sklearn.metrics import adjusted_rand_score

    return float(adjusted_rand_score(labels.cpu().numpy(), clusters.cpu().numpy()))


class F1Config(MetricConfig, frozen=True):
    r"""F1 score of "same cluster" as a prediction of "same class", over all pairs of points.

    .. math:: \frac{2 \sum_{ij} \binom{n_{ij}}{2}}{\sum_i \binom{a_i}{2} + \sum_j \binom{b_j}{2}}
    """

    name: Literal["f1"] = "f1"
    iterations: PositiveInt = 20
    """Maximum number of iterations of Lloyd's algorithm; it stops earlier when no assignment changes."""
    restarts: PositiveInt = 1
    """Number of clusterings; the one with the least squared distance is used."""
    seed: NonNegativeInt = 0
    """Seed of the clustering."""
    key: ClassVar[str] = "f1"
    definition: ClassVar[str] = "f1: F1 over pairs of points, same k-means cluster against same class"
    searches: ClassVar[bool] = False

    def of_points(self, points: Points) -> dict[str, float]:
        clusters = class_clusters(points, KMeansOptions(self.iterations, self.restarts, self.seed))
        return {"f1": pairwise_f1(points.labels, clusters)}


def pairwise_f1(labels: Tensor, clusters: Tensor) -> float:
    """Compute F1 over pairs; 1 if neither partition has a part of two points.

    Example:
        >>> import torch
        >>> pairwise_f1(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 1]))
        0.4
    """
    table = Contingency.of(labels, clusters)
    both, same_class, same_cluster = (
        int((n * (n - 1) // 2).sum()) for n in (table.overlap, table.classes, table.clusters)
    )
    return 2 * both / (same_class + same_cluster) if same_class + same_cluster else 1.0
