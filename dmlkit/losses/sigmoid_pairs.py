"""Sigmoid pair loss: each pair is classified on its own as same or different, with a learned scale and bias."""

import math

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn
from torch.nn.functional import softplus

from dmlkit.component import option
from dmlkit.losses.pair_loss import PairLoss, Pairs


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
