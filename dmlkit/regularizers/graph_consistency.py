"""Graph consistency: two draws of the same classes span the same graph."""

from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.manifolds.base import Manifold, safe_sqrt
from dmlkit.regularizers.base import Regularizer, RegularizerConfig


class GraphConsistencyConfig(RegularizerConfig, frozen=True):
    """CGML (Chen et al. 2021): two draws of the same classes propagate to the same features."""

    name: Literal["graph_consistency"] = "graph_consistency"
    weight: PositiveFloat = 0.001  # lambda: 0.001 with triplet, 0.002 with n_pair and binomial_deviance
    bandwidth: PositiveFloat = 1.0  # sigma, in units of the squared distance

    def build(self, manifold: Manifold) -> "GraphConsistency":
        return GraphConsistency(manifold, bandwidth=self.bandwidth)

    def requirements(self) -> Iterable[Requirement]:
        reason = "it compares two draws of the same classes, equally many images each"
        return (Requirement("sampler.name", ("paired",), reason),)


class GraphConsistency(Regularizer):
    r"""Chen et al., AAAI 2021 (CGML), eq. 3: the norm, not its square, of the difference of two propagated draws.

    .. math:: \| S' X'^T - S'' X''^T \|_F, \quad s_{ij} = \exp(-d(x_i, x_j)^2 / \sigma)

    X' and X'' have the same classes in the same order, n images each. Of each class, the first half of its
    images in the batch belongs to X' and the second half to X'': that is what the paired sampler means, and it
    holds too where the batches of several processes are gathered. The norm does not depend on the
    common order of the classes.

    The norm has no gradient at 0, where both draws propagate alike (identical embeddings, for one): d|v|/dv = v/|v|
    is 0/0, a nan that would spoil the weights. The safe form returns the subgradient 0 there, the one of least length.

    Args:
        manifold: the geometry of the embeddings; X holds the coordinates of its points.
        bandwidth: sigma > 0, in units of the squared distance; the paper does not print it.

    Raises:
        ValueError: on the CPU, a class with an odd number of images (on a GPU the check would stall the step).

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> term = GraphConsistency(Euclidean(1))
        >>> term(torch.tensor([[0.0], [3.0], [0.0], [4.0]]), torch.tensor([0, 1, 0, 1])).round(decimals=2).item()
        1.0
    """

    def __init__(self, manifold: Manifold, *, bandwidth: float = 1.0) -> None:
        super().__init__(manifold)
        self.bandwidth = bandwidth

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        first, second = aligned_halves(labels)
        difference = self._propagate(embeddings[first]) - self._propagate(embeddings[second])  # (B / 2, D)
        return safe_sqrt(difference.square().sum())

    def _propagate(self, points: Tensor) -> Tensor:
        weights = torch.exp(-self.manifold.distance(points, points).square() / self.bandwidth)  # (B / 2, B / 2)
        return weights @ points


def aligned_halves(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Split a batch in two halves with the same labels in the same order: the indices (B / 2,) of each.

    Args:
        labels: (B,) int64; each occurs an even number of times.

    Raises:
        ValueError: on the CPU, a label occurs an odd number of times.

    Example:
        >>> first, second = aligned_halves(torch.tensor([7, 3, 7, 3]))
        >>> first.tolist(), second.tolist()
        ([1, 0], [3, 2])
    """
    alike = labels[:, None] == labels  # (B, B)
    count = alike.sum(1)
    if labels.is_cpu and (count % 2).any():
        odd = labels[count % 2 == 1][0].item()
        raise ValueError(
            "GraphConsistency: expected an even number of images of each class in a batch, "
            f"got {int((labels == odd).sum())} of class {odd}"
        )
    occurrence = alike.tril(-1).sum(1)  # how many of its class came before
    is_second = occurrence >= count // 2
    by_label = labels.argsort(stable=True)
    ordered = by_label[is_second[by_label].long().argsort(stable=True)]
    first, second = ordered.chunk(2)
    return first, second
