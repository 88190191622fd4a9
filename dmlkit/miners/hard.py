"""Hard mining: the farthest positive and the nearest negative of each anchor."""

from typing import Literal

import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold
from dmlkit.miners.base import Miner, MinerConfig, Triplets


class HardConfig(MinerConfig, frozen=True):
    """Batch-hard (Hermans et al. 2017): the farthest positive and the nearest negative of each anchor."""

    name: Literal["hard"] = "hard"

    def build(self, manifold: Manifold) -> "Hard":
        return Hard()


class Hard(Miner):
    r"""Hermans et al., arXiv:1703.07737, eq. 5: one triplet for each anchor with a positive and a negative.

    .. math:: p(a) = \arg\max_p d(a, p), \quad n(a) = \arg\min_n d(a, n)

    Example:
        >>> distance = torch.tensor([[0.0, 0.5, 0.8, 0.7, 0.9]])
        >>> positive = torch.tensor([[False, True, True, False, False]])
        >>> negative = torch.tensor([[False, False, False, True, True]])
        >>> triplets = Hard()(distance, positive, negative)
        >>> triplets.keep.nonzero().tolist(), triplets.negative[0, 2].item()
        ([[0, 2]], 3)
    """

    @torch.no_grad()
    def __call__(self, distance: Tensor, positive: Tensor, negative: Tensor) -> Triplets:
        farthest = distance.masked_fill(~positive, -torch.inf).argmax(1)  # (B,)
        nearest = distance.masked_fill(~negative, torch.inf).argmin(1)  # (B,)
        is_farthest = torch.zeros_like(positive).scatter_(1, farthest[:, None], True)
        keep = is_farthest & positive & negative.any(1, keepdim=True)
        return Triplets(keep, nearest[:, None].expand_as(distance))
