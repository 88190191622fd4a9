"""The miner interface: which triplets of a batch a pair loss looks at."""

from abc import ABC, abstractmethod

from torch import Tensor

from dmlkit.component import ComponentConfig


class MinerConfig(ComponentConfig, frozen=True):
    """Root of the miner family."""

    def build(self) -> "Miner":
        """The miner."""
        raise NotImplementedError


class Miner(ABC):
    """Chooses triplets by their distances."""

    @abstractmethod
    def __call__(self, distance: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Anchor, positive and negative indices (T,) each, of distances (B, B) and labels (B,)."""
