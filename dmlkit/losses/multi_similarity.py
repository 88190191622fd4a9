"""Multi-similarity loss: selects hard pairs by comparing positives with negatives, then weights them softly."""

from collections.abc import Iterable

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn.functional import softplus

from dmlkit.component import Requirement
from dmlkit.losses.pair_loss import PairLoss, Pairs, masked_logsumexp
from dmlkit.manifolds.base import NEEDS_BOUNDED


class MultiSimilarity(PairLoss, name="multi_similarity"):
    r"""Multi-similarity (Wang et al. 2019): selects the pairs near the class boundary and weights them softly.

    Wang et al., CVPR 2019 (arXiv:1904.06627), eq. 15; S = relative similarity.

    .. math:: \frac{1}{B} \sum_i \frac{1}{\alpha} \log(1 + \sum_{k \in P_i} e^{-\alpha (S_{ik} - \lambda)})
            + \frac{1}{\beta} \log(1 + \sum_{k \in N_i} e^{\beta (S_{ik} - \lambda)})

    Mining (eq. 11, 12) keeps in N_i the negatives with S above the smallest S of a positive minus epsilon, and in P_i
    the positives with S below the largest S of a negative plus epsilon. It is part of the loss, not a miner, because
    it selects pairs, not triplets. The threshold lambda is 1 in the paper's text and 0.5 in the authors' code.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> points = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
        >>> loss = MultiSimilarity(Sphere(2), positive_scale=1, negative_scale=1, threshold=1)
        >>> round(loss(points, torch.tensor([0, 0, 1])).item(), 4)  # (2 (log 2 + log 2) + log 3) / 3
        0.9242
    """

    positive_scale: PositiveFloat = 2.0
    """alpha, inverse temperature of positives."""
    negative_scale: PositiveFloat = 50.0
    """beta, inverse temperature of negatives."""
    threshold: float = 0.5
    """lambda, in similarity units (cosine on the sphere)."""
    mining_margin: NonNegativeFloat | None = 0.1
    """epsilon, in similarity units; null keeps all pairs."""

    def requirements(self) -> Iterable[Requirement]:
        return (*super().requirements(), NEEDS_BOUNDED)

    def compute_pairs(self, pairs: Pairs) -> Tensor:
        similarity = self.manifold.relative_similarity(pairs.rows, pairs.columns)  # (B, M)
        positive, negative = pairs.positive, pairs.negative
        if self.mining_margin is not None:
            positive, negative = _mine(similarity.detach(), positive, negative, self.mining_margin)
        offset = similarity - self.threshold
        pull = softplus(masked_logsumexp(-self.positive_scale * offset, where=positive)) / self.positive_scale
        push = softplus(masked_logsumexp(self.negative_scale * offset, where=negative)) / self.negative_scale
        return (pull + push).mean()


def _mine(similarity: Tensor, positive: Tensor, negative: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    hardest_positive = similarity.masked_fill(~positive, torch.inf).amin(1, keepdim=True)  # inf if there is none
    hardest_negative = similarity.masked_fill(~negative, -torch.inf).amax(1, keepdim=True)
    return positive & (similarity - margin < hardest_negative), negative & (similarity + margin > hardest_positive)
