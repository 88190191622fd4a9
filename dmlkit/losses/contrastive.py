"""Contrastive losses: pull positives within one margin and push negatives beyond another."""

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from dmlkit.losses.pair_loss import PairLoss, Pairs
from dmlkit.manifolds.products import EPSILON, squared_distances


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
        distance = self.distance(pairs)
        pulled = pairs.positive & (distance > self.positive_margin)
        pushed = pairs.negative & (distance < self.negative_margin)
        weight = torch.where(pushed, _share(pushed, distance), 0.0)
        weight = torch.where(pulled, _share(pulled, distance), weight)
        margin = distance.new_full(distance.shape, self.negative_margin)
        violation = distance - margin.masked_fill_(pairs.positive, self.positive_margin)  # up to its sign
        return ((violation.square() if self.squared else violation.abs()) * weight).sum()

    def distance(self, pairs: Pairs) -> Tensor:
        """Return the distance of each pair: (B, M)."""
        return self.manifold.distance(pairs.rows, pairs.columns)


class SNRContrastive(Contrastive, name="snr_contrastive"):
    r"""SNR contrastive (Yuan et al. 2019): the contrastive loss of the ratio of noise to signal.

    Yuan et al., CVPR 2019 (arXiv:1904.02616), section 3: the signal is the image, the noise what another adds to it.
    The variance is over the features of an image, so that d does not change when all points are scaled alike.

    .. math:: d_{ij} = \frac{\mathrm{var}(x_i - x_j)}{\mathrm{var}(x_i)}, \qquad
            L + \frac{\lambda}{B} \sum_i \Big| \sum_m x_{im} \Big|

    L is `Contrastive` without squares. The last term brings the mean of the features to 0, as the paper assumes. In
    curved spaces x are the features of a point (``manifold.to_features``).

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> points = torch.tensor([[1.0, -1.0], [2.0, -2.0], [1.0, -0.5]])
        >>> loss = SNRContrastive(Euclidean(2))
        >>> round(loss(points, torch.tensor([0, 0, 1])).item(), 4)  # (1 + .25) / 2 + (.9375 + .6094 + .8889) / 3
        1.4369
    """

    squared: bool = False
    """Square each violation."""
    regularizer_weight: NonNegativeFloat = 0.0
    """lambda, weight of the sums of the features."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.manifold.dim == 1:
            raise ValueError("SNRContrastive: one feature has no variance; expected at least 2 dimensions, got 1")

    def compute_pairs(self, pairs: Pairs) -> Tensor:
        loss = super().compute_pairs(pairs)
        if not self.regularizer_weight:
            return loss
        return loss + self.regularizer_weight * self.manifold.to_features(pairs.rows).sum(1).abs().mean()

    def distance(self, pairs: Pairs) -> Tensor:
        signal, other = (_centered(self.manifold.to_features(points)) for points in (pairs.rows, pairs.columns))
        noise = squared_distances(signal, other)  # the variance but for its divisor, which cancels
        return noise / signal.square().sum(1, keepdim=True).clamp(min=EPSILON**2)


def _centered(features: Tensor) -> Tensor:
    return features - features.mean(1, keepdim=True)


def _share(where: Tensor, like: Tensor) -> Tensor:
    """Return the weight of each entry kept by ``where`` in their mean, a scalar; 1 if none is kept."""
    return where.count_nonzero().clamp(min=1).to(like.dtype).reciprocal()
