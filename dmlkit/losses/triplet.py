"""Triplet loss: an anchor is closer to its own class than to any other, by a margin."""

from typing import Annotated, Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

from dmlkit.component import one_of
from dmlkit.losses.base import LossConfig
from dmlkit.losses.pairs import PairLoss, Pairs, masked_mean
from dmlkit.manifolds.base import Manifold
from dmlkit.miners.all import All, AllConfig
from dmlkit.miners.base import Miner, MinerConfig

CHUNK = 2**22  # triplets computed at once by the smooth form: 16 MB a float32 matrix


class TripletConfig(LossConfig, frozen=True):
    """Triplet (Weinberger & Saul 2009, Schroff et al. 2015): mean over the triplets that violate the margin."""

    over_pairs = True
    name: Literal["triplet"] = "triplet"
    margin: NonNegativeFloat = 0.1  # alpha, in units of the squared distance
    squared: bool = True  # compare squared distances
    smooth: bool = False  # log(1 + e^x) in place of max(0, x)
    miner: Annotated[MinerConfig, one_of] = AllConfig()

    def build(self, manifold: Manifold, num_classes: int) -> "Triplet":
        return Triplet(
            manifold,
            margin=self.margin,
            squared=self.squared,
            smooth=self.smooth,
            miner=self.miner.build(manifold),
        )


class Triplet(PairLoss):
    r"""Schroff et al., CVPR 2015 (arXiv:1503.03832), eq. 3, over the mined triplets (a, p, n).

    .. math:: \frac{1}{|T_+|} \sum_{(a, p, n)} [d(a,p)^2 - d(a,n)^2 + \alpha]_+

    T+ are the triplets with a positive term; a batch without any has loss 0. The smooth form
    log(1 + exp(d(a,p)^2 - d(a,n)^2 + alpha)) of Hermans et al., arXiv:1703.07737, section 2 (there with alpha = 0),
    is averaged over all mined triplets.

    The sum over all triplets is piecewise linear in the distances, so sorting each row gives its slopes: time
    B^2 log B and memory B^2, not B^3, and the same value. The smooth form walks the triplets in chunks.

    Args:
        manifold: the geometry whose distance d is compared.
        margin: alpha >= 0, in units of d^2, or of d where not ``squared``.
        squared: compare squared distances.
        smooth: softplus in place of the hinge.
        miner: chooses the triplets; all of them by default.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> line = Euclidean(1)
        >>> round(Triplet(line, margin=0.5)(torch.tensor([[0.0], [1.0], [1.0]]), torch.tensor([0, 0, 1])).item(), 6)
        1.0
    """

    def __init__(
        self,
        manifold: Manifold,
        *,
        margin: float = 0.1,
        squared: bool = True,
        smooth: bool = False,
        miner: Miner | None = None,
    ) -> None:
        super().__init__(manifold)
        self.margin, self.squared, self.smooth = margin, squared, smooth
        self.miner = miner or All()

    def compute_pairs(self, pairs: Pairs) -> Tensor:
        distance = self.manifold.distance(pairs.rows, pairs.columns)  # (B, M)
        triplets = self.miner(distance.detach(), pairs.positive, pairs.negative)
        if self.squared:
            distance = distance.square()
        if triplets.negative is None:
            over_all = _smooth_mean if self.smooth else _hinge_mean
            return over_all(distance, triplets.keep, pairs.negative, self.margin)
        return self._mean_over_mined(distance, triplets.keep, triplets.negative)

    def _mean_over_mined(self, distance: Tensor, keep: Tensor, negative: Tensor) -> Tensor:
        violation = distance - distance.gather(1, negative) + self.margin  # (B, M)
        if self.smooth:
            return masked_mean(softplus(violation), where=keep)
        return masked_mean(violation, where=keep & (violation > 0))


def _hinge_mean(distance: Tensor, positive: Tensor, negative: Tensor, margin: float) -> Tensor:
    """Mean of [d(a,p) - d(a,n) + margin]_+ over the triplets where it is positive.

    It is sum(slope * d) + margin * |T+|, all over |T+|: the slope of a positive is the number of negatives that it
    violates, the slope of a negative is minus the number of positives that violate it.
    """
    columns = distance.shape[1]
    with torch.no_grad():
        reach = (distance + margin).masked_fill(~positive, -torch.inf)
        negatives = distance.masked_fill(~negative, torch.inf)
        violated = torch.searchsorted(negatives.sort(1).values, reach)  # (B, M), negatives nearer than the reach
        spared = torch.searchsorted(reach.sort(1).values, negatives, right=True)  # positives that do not reach it
        slope = violated * positive - (columns - spared) * negative  # (B, M) int64
        count = (violated * positive).sum().to(distance.dtype)  # margin * an int64 would round to float32
    total = (distance * slope).sum() + margin * count
    return total / count.clamp(min=1)


def _smooth_mean(distance: Tensor, positive: Tensor, negative: Tensor, margin: float) -> Tensor:
    """Mean of log(1 + exp(d(a,p) - d(a,n) + margin)) over all triplets, at most `CHUNK` of them at a time."""

    def chunk_sum(distance: Tensor, anchor: Tensor, column: Tensor) -> Tensor:
        violation = distance[anchor, column, None] - distance[anchor] + margin  # (pairs, M)
        return softplus(violation).masked_fill(~negative[anchor], 0).sum()

    pairs_at_once = max(1, CHUNK // distance.shape[1])
    # The one list of indices in the pair losses, and so one wait for the device: B^3 cells would cost more.
    chunks = positive.nonzero().split(pairs_at_once)
    if len(chunks) == 1:
        total = chunk_sum(distance, *chunks[0].T)
    else:
        # Recomputed in the backward pass: all the chunks at once would hold B^3 numbers.
        total = torch.stack([checkpoint(chunk_sum, distance, *chunk.T, use_reentrant=False) for chunk in chunks]).sum()
    count = (positive.sum(1) * negative.sum(1)).sum()
    return total / count.clamp(min=1)
