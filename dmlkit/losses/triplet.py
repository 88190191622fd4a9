"""Triplet loss: an anchor is closer to its own class than to any other, by a margin."""

from typing import Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from dmlkit.losses.base import Loss, LossConfig
from dmlkit.manifolds.base import Manifold


class TripletConfig(LossConfig, frozen=True):
    """Triplet (Weinberger & Saul 2009, Schroff et al. 2015): mean over the triplets that violate the margin."""

    name: Literal["triplet"] = "triplet"
    margin: NonNegativeFloat = 0.1  # alpha, in units of the squared distance
    squared: bool = True  # compare squared distances

    def build(self, manifold: Manifold, num_classes: int) -> "Triplet":
        return Triplet(manifold, margin=self.margin, squared=self.squared)


class Triplet(Loss):
    r"""Schroff et al., CVPR 2015 (arXiv:1503.03832), eq. 3, over all triplets (a, p, n) of the batch.

    .. math:: \frac{1}{|T_+|} \sum_{(a, p, n)} [d(a,p)^2 - d(a,n)^2 + \alpha]_+

    T+ are the triplets with a positive term; a batch without any has loss 0.

    Args:
        manifold: the geometry whose distance d is compared.
        margin: alpha >= 0, in units of d^2, or of d where not ``squared``.
        squared: compare squared distances.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> line = Euclidean(1)
        >>> round(Triplet(line, margin=0.5)(torch.tensor([[0.0], [1.0], [1.0]]), torch.tensor([0, 0, 1])).item(), 6)
        1.0
    """

    def __init__(self, manifold: Manifold, *, margin: float = 0.1, squared: bool = True) -> None:
        super().__init__(manifold)
        self.margin, self.squared = margin, squared

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        distance = self.manifold.distance(embeddings, embeddings)  # (B, B)
        if self.squared:
            distance = distance.square()
        alike = labels[:, None] == labels
        anchor, positive = (alike & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)).nonzero(
            as_tuple=True
        )
        violation = distance[anchor, positive, None] - distance[anchor] + self.margin  # (pairs, B)
        violation = violation.relu().masked_fill(alike[anchor], 0)
        return violation.sum() / (violation > 0).sum().clamp(min=1)
