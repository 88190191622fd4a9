"""Semi-hard mining: negatives that are farther than the positive, but not by much."""

from typing import Literal

import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold
from dmlkit.miners.base import Miner, MinerConfig, Triplets


class SemiHardConfig(MinerConfig, frozen=True):
    """Semi-hard (Schroff et al. 2015): for each positive, the nearest negative that is farther than the positive."""

    name: Literal["semi_hard"] = "semi_hard"

    def build(self, manifold: Manifold) -> "SemiHard":
        return SemiHard()


class SemiHard(Miner):
    r"""Schroff et al., CVPR 2015 (arXiv:1503.03832), section 3.2: all positives, each with a semi-hard negative.

    .. math:: n(a, p) = \arg\min_n \{ d(a, n) : d(a, n) > d(a, p) \}

    The paper does not say which semi-hard negative to use; this takes the hardest one. A positive that is farther
    than every negative is skipped.

    Example:
        >>> distance = torch.tensor([[0.0, 0.5, 0.4, 0.7, 0.9]])
        >>> positive = torch.tensor([[False, True, False, False, False]])
        >>> negative = torch.tensor([[False, False, True, True, True]])
        >>> SemiHard()(distance, positive, negative).negative[0, 1].item()
        3
    """

    @torch.no_grad()
    def __call__(self, distance: Tensor, positive: Tensor, negative: Tensor) -> Triplets:
        ordered, columns = distance.masked_fill(~negative, torch.inf).sort(dim=1)  # (B, M), nearest negative first
        first_beyond = torch.searchsorted(ordered, distance, right=True)  # (B, M), M if nothing is farther
        exists = first_beyond < negative.sum(1, keepdim=True)
        return Triplets(positive & exists, columns.gather(1, first_beyond.clamp(max=distance.shape[1] - 1)))
