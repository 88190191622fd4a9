"""Margin loss: pairs on the right side of a learned boundary, with negatives sampled uniformly by distance."""

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from dmlkit.component import option
from dmlkit.losses.pair_loss import PairLoss, Pairs
from dmlkit.miners import DistanceWeighted, Miner, Triplets


class Margin(PairLoss, name="margin"):
    r"""Margin (Wu et al. 2017): positives inside and negatives outside a learned boundary.

    Wu et al., ICCV 2017 (arXiv:1706.07567), eq. 5, over the pairs of the mined triplets (a, p, n).

    .. math:: \frac{1}{|L_+|} \sum_{(a,p,n)} [d(a,p) - \beta_{y_a} + \alpha]_+ + [\beta_{y_a} - d(a,n) + \alpha]_+

    L+ are the terms above 0. The boundary beta of a class starts at ``beta`` and is learned with the network (the
    paper's beta_0 + beta_class, without its per-image term and its regularizer nu). Without ``per_class`` all classes
    have the same one. A pair that occurs in several triplets counts once for each.

    Raises:
        ValueError: the default miner is used with a manifold other than the sphere.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> points = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> loss = Margin(Sphere(2), num_classes=2, beta=1.4)
        >>> round(loss(points, torch.tensor([0, 0, 1])).item(), 4)  # 1.4 - sqrt(2) + 0.2
        0.1858
    """

    takes_several_labels = False
    num_classes: int = option(kw_only=False)
    """C, the number of training classes."""
    margin: NonNegativeFloat = 0.2
    """alpha, a distance."""
    initial_beta: PositiveFloat = option(default=1.2, alias="beta")
    """beta_0, a distance: the initial boundary between positives and negatives."""
    learn_beta: bool = True
    """Train the boundaries."""
    per_class: bool = True
    """Give each class its own boundary, rather than one to all."""
    miner: Miner = DistanceWeighted.Config()
    """Selects the triplets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        boundaries = torch.full((self.num_classes if self.per_class else 1,), self.initial_beta)
        self.beta = nn.Parameter(boundaries, requires_grad=self.learn_beta)

    def compute_pairs(self, pairs: Pairs) -> Tensor:
        distance = self.manifold.distance(pairs.rows, pairs.columns)  # (B, M)
        beta = (self.beta[pairs.labels, None] if self.per_class else self.beta).to(distance.dtype)  # (B, 1) or (1,)
        triplets = self.miner(distance.detach(), pairs.positive, pairs.negative)
        positives, negatives = _uses(triplets, pairs.negative)  # (B, M)
        pull = (distance - beta + self.margin).relu()
        push = (beta - distance + self.margin).relu()
        active = positives * (pull > 0) + negatives * (push > 0)
        return (positives * pull + negatives * push).sum() / active.sum().clamp(min=1)


def _uses(triplets: Triplets, negative: Tensor) -> tuple[Tensor, Tensor]:
    """Count the triplets that use each pair as anchor and positive, and as anchor and negative: (B, M) int64 each."""
    keep = triplets.keep.long()
    if triplets.negative is None:
        return keep * negative.sum(1, keepdim=True), negative * keep.sum(1, keepdim=True)
    return keep, torch.zeros_like(keep).scatter_add(1, triplets.negative, keep)
