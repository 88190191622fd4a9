"""Contrastive loss: pulls positives within one margin and pushes negatives beyond another."""

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from dmlkit.losses.pair_loss import PairLoss, Pairs


class Contrastive(PairLoss, name="contrastive"):
    r"""Contrastive (Hadsell et al. 2006): pulls positives together and pushes negatives beyond a margin.

    Hadsell et al., CVPR 2006, eq. 4; d = manifold distance; q = 2, or 1 without ``squared``.

    .. math:: \frac{1}{|P_+|} \sum_{P} [d_{ij} - m_+]_+^q + \frac{1}{|N_+|} \sum_{N} [m_- - d_{ij}]_+^q

    The paper's factors 1/2 are omitted, and its sum over pairs is replaced by averages over P+ and N+, the positive and
    the negative pairs with a positive term: most negatives have no loss and would outweigh the others in a mean.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> points = torch.tensor([[0.0], [2.0], [2.5]])
        >>> Contrastive(Euclidean(1))(points, torch.tensor([0, 0, 1])).item()  # 2^2 + (1 - 0.5)^2
        4.25
    """

    positive_margin: NonNegativeFloat = 0.0
    """m+, the distance below which a positive pair has no loss."""
    negative_margin: PositiveFloat = 1.0
    """m-, the distance above which a negative pair has no loss."""
    squared: bool = True
    """Square each violation, as in the paper."""

    def compute_pairs(self, pairs: Pairs) -> Tensor:
        distance = self.manifold.distance(pairs.rows, pairs.columns)  # (B, M)
        pulled = pairs.positive & (distance > self.positive_margin)
        pushed = pairs.negative & (distance < self.negative_margin)
        weight = torch.where(pushed, _share(pushed, distance), 0.0)
        weight = torch.where(pulled, _share(pulled, distance), weight)
        margin = distance.new_full(distance.shape, self.negative_margin)
        violation = distance - margin.masked_fill_(pairs.positive, self.positive_margin)  # up to its sign
        return ((violation.square() if self.squared else violation.abs()) * weight).sum()


def _share(where: Tensor, like: Tensor) -> Tensor:
    """Return the weight of each entry kept by ``where`` in their mean, a scalar; 1 if none is kept."""
    return where.count_nonzero().clamp(min=1).to(like.dtype).reciprocal()
