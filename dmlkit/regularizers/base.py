"""The regularizer interface: a term of a batch that is added to any loss, in full precision."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from pydantic import PositiveFloat
from torch import Tensor, nn

from dmlkit.component import ComponentConfig
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.numerics.autocast import without_autocast


class RegularizerConfig(ComponentConfig, frozen=True):
    """Root of the regularizer family."""

    weight: PositiveFloat = 1.0
    """lambda, weight of the term relative to the loss."""

    @abstractmethod
    def build(self, manifold: Manifold) -> "Regularizer":
        """Return the term for embeddings on ``manifold``; the trainer multiplies it by ``weight``."""


class Regularizer(nn.Module, ABC):
    """A term added to a loss. A subclass implements `compute`; autocast is off inside it, as for losses."""

    def __init__(self, manifold: Manifold) -> None:
        super().__init__()
        self.manifold = manifold

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Compute the unweighted term of a batch: embeddings (B, D), labels (B,) int64 -> scalar."""
        with without_autocast(embeddings):
            return self.compute(embeddings.float() if embeddings.itemsize < 4 else embeddings, labels)

    def use_levels(self, levels: Mapping[str, Tensor]) -> None:
        """Take the levels of the training classes, coarsest first, (C,) int64 each; a term may ignore them.

        Raises:
            OptionError: the term needs levels, and there are none.
        """

    @abstractmethod
    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Compute the unweighted term in at least float32."""
