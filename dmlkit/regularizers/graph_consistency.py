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
    weight: PositiveFloat = 0.001
    """lambda: 0.001 with triplet, 0.002 with n_pair and binomial_deviance."""
    bandwidth: PositiveFloat = 1.0
    """sigma, in units of the squared distance."""

    def build(self, manifold: Manifold) -> "GraphConsistency":
        return GraphConsistency(manifold, bandwidth=self.bandwidth)

    def requirements(self) -> Iterable[Requirement]:
        reason = "it compares two draws of the same classes, equally many images each"
        return (Requirement("sampler.name", ("paired",), reason),)


class GraphConsistency(Regularizer):
    r"""Chen et al., AAAI 2021 (CGML), eq. 3: the norm, not its square, of the difference of two propagated draws.

    .. math:: \| S' {X'}^T - S'' {X''}^T \|_F, \quad s_{ij} = \exp(-d(x_i, x_j)^2 / \sigma)

    X' and X'' have the same classes in the same order, n images each. Of each class, the first half of its images
    in the batch belongs to X' and the second half to X'': for a batch of the paired sampler those are its halves. An
    image without a counterpart (the other one could not be read) is left out.

    The norm has no gradient at 0, where both draws propagate alike (identical embeddings, for one): d|v|/dv = v/|v|
    is 0/0, a nan that would spoil the weights. The safe form returns the subgradient 0 there, the one of least length.

    Args:
        manifold: the geometry of the embeddings; X holds the coordinates of its points.
        bandwidth: sigma > 0, in units of the squared distance; the paper does not print it.

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
        first, second, is_used = aligned_draws(labels)
        difference = self._propagate(embeddings[first], is_used) - self._propagate(embeddings[second], is_used)
        return safe_sqrt(difference.square().sum())

    def _propagate(self, points: Tensor, is_used: Tensor) -> Tensor:
        """S X^T of the used points: (H, D) -> (H, D)."""
        weights = torch.exp(-self.manifold.distance(points, points).square() / self.bandwidth)  # (H, H)
        return (weights @ (points * is_used[:, None])) * is_used[:, None]


def aligned_draws(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split a batch in two draws with the same labels in the same order.

    Args:
        labels: (B,) int64.

    Returns:
        The indices (H,) of each draw, H = B // 2, and which of the H places are used (H,): a class with an odd
        number of images leaves its last one out. The shapes depend on B alone, so nothing waits for a GPU.

    Example:
        >>> first, second, is_used = aligned_draws(torch.tensor([7, 3, 7, 3, 3]))
        >>> first.tolist(), second.tolist(), is_used.tolist()
        ([1, 0], [3, 2], [True, True])
    """
    alike = labels[:, None] == labels  # (B, B)
    half = alike.sum(1) // 2
    occurrence = alike.tril(-1).sum(1)  # how many of its class came before
    by_label = labels.argsort(stable=True)

    def in_front(chosen: Tensor) -> Tensor:
        return by_label[(~chosen[by_label]).long().argsort(stable=True)][: len(labels) // 2]

    is_first = occurrence < half
    is_used = torch.arange(len(labels) // 2, device=labels.device) < is_first.sum()
    return in_front(is_first), in_front((occurrence >= half) & (occurrence < 2 * half)), is_used
