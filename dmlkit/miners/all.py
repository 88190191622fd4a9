"""No mining: every triplet of the batch."""

from typing import Literal

from torch import Tensor

from dmlkit.manifolds.base import Manifold
from dmlkit.miners.base import Miner, MinerConfig, Triplets


class AllConfig(MinerConfig, frozen=True):
    """Every triplet: each positive with each negative of its anchor."""

    name: Literal["all"] = "all"

    def build(self, manifold: Manifold) -> "All":
        return All()


class All(Miner):
    """Every triplet of the batch.

    Example:
        >>> import torch
        >>> same = torch.tensor([[False, True, False]])
        >>> All()(torch.rand(1, 3), same, ~same).negative is None
        True
    """

    def __call__(self, distance: Tensor, positive: Tensor, negative: Tensor) -> Triplets:
        return Triplets(positive, None)
