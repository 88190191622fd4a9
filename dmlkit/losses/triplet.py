"""Triplet loss: an anchor must be closer to its own class than to any other, by a margin."""

import torch
from pydantic import NonNegativeFloat
from torch import Tensor
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

from dmlkit.losses.pair_loss import PairLoss, Pairs, masked_mean
from dmlkit.miners import All, Miner, Triplets

CHUNK = 2**21  # triplets that the smooth form computes at once: 8 MB per float32 matrix


class Triplet(PairLoss, name="triplet"):
    r"""Triplet (Weinberger & Saul 2009, Schroff et al. 2015): mean over the triplets that violate the margin.

    Schroff et al., CVPR 2015 (arXiv:1503.03832), eq. 3, over the mined triplets (a, p, n).

    .. math:: \frac{1}{|T_+|} \sum_{(a, p, n)} [d(a,p)^2 - d(a,n)^2 + \alpha]_+

    T+ are the triplets with a positive term; a batch without any has loss 0. The smooth form
    log(1 + exp(d(a,p)^2 - d(a,n)^2 + alpha)) of Hermans et al., arXiv:1703.07737, section 2 (there with alpha = 0),
    is averaged over all mined triplets.

    The sum of the hinges is piecewise linear in each distance: sum(slope * d) + alpha |T+|. If all triplets are used,
    sorting each row gives the slopes in time B^2 log B and memory B^2 instead of B^3, with the same value. The smooth
    form processes the triplets in chunks.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> line = Euclidean(1)
        >>> round(Triplet(line, margin=0.5)(torch.tensor([[0.0], [1.0], [1.0]]), torch.tensor([0, 0, 1])).item(), 6)
        1.0
    """

    margin: NonNegativeFloat = 0.1
    """alpha, in units of the squared distance, or of the distance without ``squared``."""
    squared: bool = True
    """Compare squared distances."""
    smooth: bool = False
    """Use log(1 + e^x) instead of max(0, x)."""
    miner: Miner = All.Config()
    """Selects the triplets."""

    def compute_pairs(self, pairs: Pairs) -> Tensor:
        distance = self.manifold.distance(pairs.rows, pairs.columns)  # (B, M)
        triplets = self.miner(distance.detach(), pairs.positive, pairs.negative)
        if self.squared:
            distance = distance.square()
        if self.smooth:
            if triplets.negative is None:
                return _smooth_mean(distance, triplets.keep, pairs.negative, self.margin)
            return masked_mean(softplus(distance - distance.gather(1, triplets.negative) + self.margin), triplets.keep)
        slope, count = _slope(distance.detach(), triplets, pairs.negative, self.margin)
        return ((distance * slope).sum() + self.margin * count) / count.clamp(min=1)


def _slope(distance: Tensor, triplets: Triplets, negative: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """Return the slope of the sum of hinges in each distance (B, M), and the number of hinges above 0.

    The slope of a positive is the number of negatives that violate it; the slope of a negative is minus the number of
    positives that it violates. Both have the dtype of ``distance``: margin times an int64 would round to float32.
    """
    if triplets.negative is not None:
        nearest_allowed = distance.gather(1, triplets.negative) - margin
        violated = (triplets.keep & (distance > nearest_allowed)).to(distance.dtype)
        return violated.scatter_add(1, triplets.negative, -violated), violated.sum()
    reach = (distance + margin).masked_fill(~triplets.keep, -torch.inf)
    negatives = distance.masked_fill(~negative, torch.inf)
    violators = torch.searchsorted(negatives.sort(1).values, reach)  # (B, M), number of negatives within reach
    spared = torch.searchsorted(reach.sort(1).values, negatives, right=True)  # (B, M), positives not reaching it
    violating = (distance.shape[1] - spared) * negative
    return (violators - violating).to(distance.dtype), violators.sum().to(distance.dtype)


def _smooth_mean(distance: Tensor, positive: Tensor, negative: Tensor, margin: float) -> Tensor:
    """Compute the mean of log(1 + exp(d(a,p) - d(a,n) + margin)) over all triplets, `CHUNK` of them at a time."""

    def chunk_sum(distance: Tensor, anchor: Tensor, column: Tensor) -> Tensor:
        violation = distance[anchor, column, None] - distance[anchor] + margin  # (pairs, M)
        return softplus(violation).masked_fill(~negative[anchor], 0).sum()

    pairs_at_once = max(1, CHUNK // distance.shape[1])
    # The only index list in the pair losses, and so one wait for the device: B^3 cells would cost more.
    chunks = positive.nonzero().split(pairs_at_once)
    if len(chunks) == 1:
        total = chunk_sum(distance, *chunks[0].T)
    else:
        # Recomputed in the backward pass: keeping all chunks would take B^3 numbers.
        total = torch.stack([checkpoint(chunk_sum, distance, *chunk.T, use_reentrant=False) for chunk in chunks]).sum()
    count = (positive.sum(1) * negative.sum(1)).sum()
    return total / count.clamp(min=1)
