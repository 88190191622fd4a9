"""Margin loss: pairs on the right side of a learned boundary, with negatives sampled uniformly by distance."""

from typing import Annotated, Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from dmlkit.component import one_of
from dmlkit.losses.pair_loss import PairLoss, PairLossConfig, Pairs
from dmlkit.manifolds.base import Manifold
from dmlkit.miners import DistanceWeighted, DistanceWeightedConfig, Miner, MinerConfig, Triplets


class MarginConfig(PairLossConfig, frozen=True):
    """Margin (Wu et al. 2017): positives inside and negatives outside a learned boundary for each class."""

    name: Literal["margin"] = "margin"
    margin: NonNegativeFloat = 0.2
    """alpha, a distance."""
    beta: PositiveFloat = 1.2
    """beta_0, a distance: the initial boundary between positives and negatives."""
    learn_beta: bool = True
    """Train a boundary for each class."""
    miner: Annotated[MinerConfig, one_of] = DistanceWeightedConfig()
    """Selects the triplets."""

    def build(self, manifold: Manifold, num_classes: int) -> "Margin":
        return Margin(
            manifold,
            num_classes,
            margin=self.margin,
            beta=self.beta,
            learn_beta=self.learn_beta,
            miner=self.miner.build(manifold),
        )


class Margin(PairLoss):
    r"""Wu et al., ICCV 2017 (arXiv:1706.07567), eq. 5, over the pairs of the mined triplets (a, p, n).

    .. math:: \frac{1}{|L_+|} \sum_{(a,p,n)} [d(a,p) - \beta_{y_a} + \alpha]_+ + [\beta_{y_a} - d(a,n) + \alpha]_+

    L+ are the terms above 0. The boundary beta of a class starts at ``beta`` and is learned with the network (the
    paper's beta_0 + beta_class, without its per-image term and its regularizer nu). A pair that occurs in several
    triplets counts once for each.

    Args:
        manifold: the geometry whose distance d is used.
        num_classes: C; each class has one boundary.
        margin: alpha >= 0, a distance.
        beta: > 0, a distance.
        learn_beta: whether beta (C,) is trained; otherwise it is constant.
        miner: selects the triplets; by default `DistanceWeighted`, as in the paper, which needs the sphere.

    Raises:
        ValueError: the default miner is used with a manifold other than the sphere.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> points = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> loss = Margin(Sphere(2), num_classes=2, beta=1.4)
        >>> round(loss(points, torch.tensor([0, 0, 1])).item(), 4)  # 1.4 - sqrt(2) + 0.2
        0.1858
    """

    def __init__(
        self,
        manifold: Manifold,
        num_classes: int,
        *,
        margin: float = 0.2,
        beta: float = 1.2,
        learn_beta: bool = True,
        miner: Miner | None = None,
    ) -> None:
        super().__init__(manifold, num_classes)
        self.margin = margin
        self.beta = nn.Parameter(torch.full((num_classes,), beta), requires_grad=learn_beta)
        self.miner = miner or DistanceWeighted(manifold)

    def compute_pairs(self, pairs: Pairs) -> Tensor:
        distance = self.manifold.distance(pairs.rows, pairs.columns)  # (B, M)
        beta = self.beta[pairs.labels, None].to(distance.dtype)  # (B, 1)
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
