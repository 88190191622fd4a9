"""The miner interface: which triplets of a batch a loss looks at."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from dmlkit.component import ComponentConfig
from dmlkit.manifolds.base import Manifold


class MinerConfig(ComponentConfig, frozen=True):
    """Root of the miner family."""

    def build(self, manifold: Manifold) -> "Miner":
        """The miner for embeddings on ``manifold``."""
        raise NotImplementedError


@dataclass(frozen=True)
class Triplets:
    """Chosen triplets (anchor, positive, negative) of B rows and M columns, without a list of their indices.

    A list would have a length that only the device knows, and waiting for it stalls a GPU.

    Args:
        keep: (B, M) bool; cell (a, p) is an anchor with a positive that are used.
        negative: (B, M) int64; the column of the negative that goes with the cell, anything where not ``keep``.
            None: every negative of the anchor goes with each of its kept positives.
    """

    keep: Tensor
    negative: Tensor | None


class Miner(ABC):
    """Chooses triplets by their distances. What it chooses has no gradient."""

    @abstractmethod
    def __call__(self, distance: Tensor, positive: Tensor, negative: Tensor) -> Triplets:
        """The chosen triplets.

        Args:
            distance: (B, M), the manifold's distance of each anchor (row) to each candidate (column).
            positive: (B, M) bool, which columns have the class of the row and are not the row itself.
            negative: (B, M) bool, which columns have another class.
        """
