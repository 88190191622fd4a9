"""Logistic losses, which classify each pair on its own as same or different."""

import math
from collections.abc import Iterable

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn
from torch.nn.functional import softplus

from dmlkit.component import Requirement, option
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


class SigmoidPairs(PairLoss, name="sigmoid_pairs"):
    r"""Sigmoid pairs (Zhai et al. 2023, SigLIP): a logistic regression of each pair, with learned scale and bias.

    Zhai et al., ICCV 2023 (arXiv:2303.15343), section 3.2; z = 1 for pairs of one class and -1 for others, s = relative
    similarity.

    .. math:: \frac{1}{B} \sum_i \sum_{j \ne i} \log\big(1 + e^{-z_{ij} (t s_{ij} + b)}\big), \qquad t = e^{t'}

    The scale t and the bias b are learned with the network, t through its logarithm t'. No softmax connects the pairs,
    so a batch of one class, or without two images of a class, has a loss too; only a single image has none. D: the
    paper compares image i with text j, and only the pair i = j is positive; here all pairs of a class are, and no image
    is compared with itself.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> loss = SigmoidPairs(Sphere(2), scale=2.0, bias=-1.0)
        >>> points = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> round(loss(points, torch.tensor([0, 0])).item(), 4)  # log(1 + e^-(2 - 1))
        0.3133
    """

    initial_scale: PositiveFloat = option(default=10.0, alias="scale")
    """t, the initial inverse temperature."""
    initial_bias: float = option(default=-10.0, alias="bias")
    """b, initially far below 0, because most pairs are negative."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(self.initial_scale)))
        self.bias = nn.Parameter(torch.tensor(self.initial_bias))

    def compute_pairs(self, pairs: Pairs) -> Tensor:
        similarity = self.manifold.relative_similarity(pairs.rows, pairs.columns)  # (B, M)
        logit = self.log_scale.exp() * similarity + self.bias
        terms = softplus(torch.where(pairs.positive, -logit, logit))
        return torch.where(pairs.positive | pairs.negative, terms, 0).sum() / len(similarity)
