"""How two partitions of the same items overlap, and what information they share."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Contingency:
    """The overlaps of classes and clusters; only those that are not empty.

    Args:
        overlap: (M,) int64 >= 1; n_ij, items of class i in cluster j.
        of_class: (M,) int64; a_i, the size of that class.
        of_cluster: (M,) int64; b_j, the size of that cluster.
        classes: (C,) int64; all a_i.
        clusters: (K,) int64; all b_j.
        total: N.
    """

    overlap: Tensor
    of_class: Tensor
    of_cluster: Tensor
    classes: Tensor
    clusters: Tensor
    total: int

    @classmethod
    def of(cls, labels: Tensor, clusters: Tensor) -> "Contingency":
        """Compare labels (N,) with clusters (N,).

        Example:
            >>> Contingency.of(torch.tensor([0, 0, 1]), torch.tensor([5, 6, 6])).overlap.tolist()
            [1, 1, 1]
        """
        _, i, a = labels.unique(return_inverse=True, return_counts=True)
        _, j, b = clusters.unique(return_inverse=True, return_counts=True)
        pairs, overlap = torch.stack([i, j]).unique(dim=1, return_counts=True)
        return cls(overlap, a[pairs[0]], b[pairs[1]], a, b, len(labels))

    def mutual_information(self) -> float:
        r""":math:`\sum_{ij} \frac{n_{ij}}{N} \log \frac{N n_{ij}}{a_i b_j}`, in nats."""
        share = self.overlap.double() / self.total
        ratio = self.overlap.double() * self.total / (self.of_class.double() * self.of_cluster)
        return max(0.0, float((share * ratio.log()).sum()))

    def mean_entropy(self) -> float:
        """The arithmetic mean of the entropies of classes and clusters, in nats."""
        return (_entropy(self.classes, self.total) + _entropy(self.clusters, self.total)) / 2

    def expected_information(self) -> float:
        """The mutual information of random partitions with these sizes (Vinh et al., JMLR 2010, eq. 24a).

        Only sizes matter, and few sizes are distinct (at most sqrt(2N)), so each pair of sizes is summed once.
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
    """The summands of one class size ``a`` with cluster sizes (K,): (K,)."""
    n = torch.arange(1, a + 1, dtype=torch.float64, device=b.device)[:, None]  # (n, K)
    possible = (n <= b) & (n >= a + b - total)
    n = torch.where(possible, n, b.minimum(torch.full_like(b, a)))
    log_probability = (
        _log_choose(b, n)
        + _log_choose(total - b, a - n)
        - _log_choose(torch.tensor(float(total)), torch.tensor(float(a)))
    )
    terms = n / total * (total * n / (a * b)).log() * log_probability.exp()
    return terms.masked_fill(~possible, 0).sum(0)


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    n, k = n.double(), k.double()
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
