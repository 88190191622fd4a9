"""A loss: every pair of the batch is asked for one similarity or another."""

from typing import Literal

from pydantic import PositiveFloat
from torch import Tensor
from torch.nn.functional import softplus

from dmlkit.losses.base import Loss, LossConfig
from dmlkit.manifolds.base import Manifold


class ToyPairsConfig(LossConfig, frozen=True):
    """Logistic loss over all pairs of the batch."""

    name: Literal["toy_pairs"] = "toy_pairs"
    scale: PositiveFloat = 4.0
    """alpha, how steep it is."""

    def build(self, manifold: Manifold, num_classes: int) -> "ToyPairs":
        return ToyPairs(manifold, scale=self.scale)


class ToyPairs(Loss):
    """The mean of log(1 + exp(-alpha s)) over positive pairs and of log(1 + exp(alpha s)) over negative ones."""

    def __init__(self, manifold: Manifold, *, scale: float = 4.0) -> None:
        super().__init__(manifold)
        self.scale = scale

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        similarity = self.manifold.similarity(embeddings, embeddings)  # (B, B)
        sign = (labels[:, None] == labels) * 2 - 1
        return softplus(-self.scale * sign * similarity).mean()
