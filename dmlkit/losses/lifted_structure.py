"""Lifted-structure loss: compares each positive pair with all negatives of both its points."""

from collections.abc import Iterable

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.losses.base import Loss
from dmlkit.losses.pair_loss import NEEDS_PAIRS, make_pairs, masked_logsumexp


class LiftedStructure(Loss, name="lifted_structure"):
    r"""Lifted structure (Song et al. 2016): compares each positive pair with all negatives of both its points.

    Song et al., CVPR 2016 (arXiv:1511.06452), eq. 4, the smooth bound; D = manifold distance.

    .. math:: \tilde J_{ij} &= D_{ij} + \log\Big(\sum_{(i,k) \in N} e^{\alpha - D_{ik}}
                               + \sum_{(j,l) \in N} e^{\alpha - D_{jl}}\Big) \\
              \tilde J &= \frac{1}{2 |P|} \sum_{(i,j) \in P} \max(0, \tilde J_{ij})^2

    The loss needs the negatives of both points of a pair; an embedding in a memory has none. Therefore
    `CrossBatchMemory` does not accept this loss.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> points = torch.tensor([[0.0], [0.0], [1.0]])
        >>> round(LiftedStructure(Euclidean(1))(points, torch.tensor([0, 0, 1])).item(), 4)  # log(2)^2 / 2
        0.2402
    """

    margin: NonNegativeFloat = 1.0
    """alpha, a distance."""

    def requirements(self) -> Iterable[Requirement]:
        return (NEEDS_PAIRS,)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        pairs = make_pairs(embeddings, labels, embeddings, labels)
        distance = self.manifold.distance(embeddings, embeddings)  # (B, B)
        negatives = masked_logsumexp(self.margin - distance, where=pairs.negative)  # (B,)
        # Both points have the same label: either both have negatives or neither has; -inf would have a nan gradient.
        counted = pairs.positive & pairs.negative.any(1, keepdim=True)
        negatives = negatives.masked_fill(~pairs.negative.any(1), 0)
        bound = (torch.logaddexp(negatives[:, None], negatives) + distance).relu()
        total = bound.square().masked_fill(~counted, 0).sum()
        return total / (2 * pairs.positive.sum().clamp(min=1))  # P and the sum count each pair twice
