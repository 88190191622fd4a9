"""The miner interface: selects the triplets of a batch that a loss uses."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from dmlkit.component import ComponentConfig
from dmlkit.manifolds.base import Manifold


class MinerConfig(ComponentConfig, frozen=True):
    """Root of the miner family."""

    def build(self, manifold: Manifold) -> "Miner":
        """Return the miner for embeddings on ``manifold``."""
        raise NotImplementedError


@dataclass(frozen=True)
class Triplets:
    """Selected triplets (anchor, positive, negative) of B rows and M columns, without a list of their indices.

    The length of such a list is known only to the device, and waiting for it stalls a GPU.

    Args:
        keep: (B, M) bool; whether the cell (a, p) is an anchor with a positive to use.
        negative: (B, M) int64; the column of the negative for the cell; any value if ``keep`` is False.
            None: every negative of the anchor is used with each of its kept positives.
    """

    keep: Tensor
    negative: Tensor | None


class Miner(ABC):
    """Selects triplets by their distances. The selection has no gradient."""

    @abstractmethod
    def __call__(self, distance: Tensor, positive: Tensor, negative: Tensor) -> Triplets:
        """Return the selected triplets.

        Args:
            distance: (B, M), the manifold's distance of each anchor (row) to each candidate (column).
            positive: (B, M) bool, whether the column has the label of the row and is not the row itself.
            negative: (B, M) bool, whether the column has another label.
        """
