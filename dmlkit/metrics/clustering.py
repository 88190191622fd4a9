"""Clustering metrics: agreement of k-means clusters of the embeddings with the labels (NMI, AMI, ARI, F1)."""

from abc import abstractmethod
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from dmlkit.metrics.base import MetricConfig, Points, log_binomial
from dmlkit.metrics.kmeans import class_clusters


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
        clusters = class_clusters(points, iterations=self.iterations, restarts=self.restarts, seed=self.seed)
        return {self.key: self.agreement(points.labels, clusters)}

    @abstractmethod
    def agreement(self, labels: Tensor, clusters: Tensor) -> float:
        """Compute the metric of two partitions (N,) int64; 1 if they are equal."""


class NmiConfig(ClusteringConfig, frozen=True):
    r"""NMI, the normalized mutual information of the classes and as many k-means clusters; 1 if they agree.

    .. math:: \frac{I(Y; Z)}{(H(Y) + H(Z)) / 2}

    Example:
        >>> round(NmiConfig().agreement(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 0])), 6)
        1.0
    """

    name: Literal["nmi"] = "nmi"
    key: ClassVar[str] = "nmi"
    definition: ClassVar[str] = "nmi: mutual information of classes and k-means clusters / mean of their entropies"

    def agreement(self, labels: Tensor, clusters: Tensor) -> float:
        from sklearn.metrics import normalized_mutual_info_score

        return float(normalized_mutual_info_score(labels.cpu().numpy(), clusters.cpu().numpy()))


class AmiConfig(ClusteringConfig, frozen=True):
    r"""AMI, the mutual information adjusted for chance: 0 for any number of random clusters (Vinh et al., JMLR 2010).

    .. math:: \frac{I(Y; Z) - E[I]}{(H(Y) + H(Z)) / 2 - E[I]}

    Example:
        >>> round(AmiConfig().agreement(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 0])), 6)
        1.0
    """

    name: Literal["ami"] = "ami"
    key: ClassVar[str] = "ami"
    definition: ClassVar[str] = "ami: nmi adjusted for chance; 0 for random clusters"

    def agreement(self, labels: Tensor, clusters: Tensor) -> float:
        from sklearn.metrics import mutual_info_score

        sizes = [side.unique(return_counts=True)[1] for side in (labels, clusters)]
        chance = expected_information(sizes[0], sizes[1])
        room = sum(map(_entropy, sizes)) / 2 - chance
        gain = float(mutual_info_score(labels.cpu().numpy(), clusters.cpu().numpy())) - chance
        return gain / room if abs(room) > 1e-15 else 1.0


def _entropy(sizes: Tensor) -> float:
    share = sizes.double() / sizes.sum()
    return float(-(share * share.log()).sum())


def expected_information(classes: Tensor, clusters: Tensor) -> float:
    """Compute the mean mutual information, in nats, of random partitions of these sizes (Vinh et al. 2010, eq. 24a).

    Few sizes are distinct, at most sqrt(2N), so each pair of sizes is summed once. scikit-learn sums over all pairs of
    parts: more than 60 s for 60 502 points in 11 316 classes.

    Args:
        classes, clusters: (C,), (K,) int64, number of items in each part; both add up to N.
    """
    total = int(classes.sum())
    a, times_a = classes.unique(return_counts=True)
    b, times_b = clusters.unique(return_counts=True)
    rows = zip(a.tolist(), times_a.tolist(), strict=True)
    return sum(times * float((times_b * _summands(size, b.double(), total)).sum()) for size, times in rows)


def _summands(a: int, b: Tensor, total: int) -> Tensor:
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


class AriConfig(ClusteringConfig, frozen=True):
    r"""ARI, the share of pairs on which classes and clusters agree, adjusted for chance (Hubert & Arabie 1985).

    .. math:: \frac{S - E}{(A + B) / 2 - E}, \quad S = \sum_{ij} \binom{n_{ij}}{2},\ A = \sum_i \binom{a_i}{2},\
        B = \sum_j \binom{b_j}{2},\ E = A B / \binom{N}{2}

    Example:
        >>> round(AriConfig().agreement(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 2])), 6)
        0.571429
    """

    name: Literal["ari"] = "ari"
    key: ClassVar[str] = "ari"
    definition: ClassVar[str] = "ari: pairs that classes and k-means clusters agree on, adjusted for chance"

    def agreement(self, labels: Tensor, clusters: Tensor) -> float:
        from sklearn.metrics import adjusted_rand_score

        return float(adjusted_rand_score(labels.cpu().numpy(), clusters.cpu().numpy()))


class F1Config(ClusteringConfig, frozen=True):
    r"""F1 score of "same cluster" as a prediction of "same class", over all pairs of points.

    .. math:: \frac{2 \sum_{ij} \binom{n_{ij}}{2}}{\sum_i \binom{a_i}{2} + \sum_j \binom{b_j}{2}}

    It is 1 if no class and no cluster has two points.

    Example:
        >>> F1Config().agreement(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 1]))
        0.4
    """

    name: Literal["f1"] = "f1"
    key: ClassVar[str] = "f1"
    definition: ClassVar[str] = "f1: F1 over pairs of points, same k-means cluster against same class"

    def agreement(self, labels: Tensor, clusters: Tensor) -> float:
        from sklearn.metrics.cluster import pair_confusion_matrix

        (_, wrong), (missed, both) = pair_confusion_matrix(labels.cpu().numpy(), clusters.cpu().numpy()).tolist()
        return 2 * both / (2 * both + wrong + missed) if both + wrong + missed else 1.0
