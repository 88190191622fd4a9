"""Binomial deviance: logistic regression on the similarity of pairs."""

from collections.abc import Iterable

from pydantic import PositiveFloat
from torch import Tensor
from torch.nn.functional import softplus

from dmlkit.component import Requirement
from dmlkit.losses.pair_loss import PairLoss, Pairs, masked_mean
from dmlkit.manifolds.base import NEEDS_BOUNDED


class BinomialDeviance(PairLoss, name="binomial_deviance"):
    r"""Binomial deviance (Yi et al. 2014): a logistic loss on the similarity of each pair; negatives weigh more.

    Yi et al., ICPR 2014 (arXiv:1407.4979), in the form of Chen et al., AAAI 2021 (CGML), eq. 7; s = relative
    similarity.

    .. math:: \frac{1}{|P|} \sum_{P} \log(1 + e^{-\alpha (s_{ij} - \beta) \eta_+})
            + \frac{1}{|N|} \sum_{N} \log(1 + e^{\alpha (s_{ij} - \beta) \eta_-})

    Positive pairs P and negative pairs N are averaged separately, as in Yi et al.; CGML prints one sum. A batch
    of 13 classes x 10 images has 13 times more negatives than positives.

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> points = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> round(BinomialDeviance(Sphere(2))(points, torch.tensor([0, 0])).item(), 4)  # log(1 + e^-1)
        0.3133
    """

    scale: PositiveFloat = 2.0
    """alpha, inverse temperature."""
    threshold: float = 0.5
    """beta, in similarity units (cosine on the sphere)."""
    positive_cost: PositiveFloat = 1.0
    """eta+, the cost of positive pairs."""
    negative_cost: PositiveFloat = 25.0
    """eta-, the cost of negative pairs."""

    def requirements(self) -> Iterable[Requirement]:
        return (*super().requirements(), NEEDS_BOUNDED)

    def compute_pairs(self, pairs: Pairs) -> Tensor:
        logit = self.scale * (self.manifold.relative_similarity(pairs.rows, pairs.columns) - self.threshold)  # (B, M)
        pull = softplus(-self.positive_cost * logit)
        push = softplus(self.negative_cost * logit)
        return masked_mean(pull, where=pairs.positive) + masked_mean(push, where=pairs.negative)
