"""Threshold consistency (TCM): pulls and pushes only the pairs on the wrong side of two fixed margins."""

from collections.abc import Iterable
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from dmlkit.component import Requirement, recipe_key
from dmlkit.manifolds.base import NEEDS_BOUNDED
from dmlkit.regularizers.base import Regularizer, mean_where


class ThresholdConsistency(Regularizer, name="threshold_consistency"):
    r"""TCM (Zhang et al. 2024): all classes should be separable at the same similarity threshold.

    The threshold-consistent margin, L_TCM of Zhang et al., ICLR 2024 (arXiv:2307.04047); s = relative similarity.

    .. math:: \frac{\sum_{s \in S^+} (m^+ - s) \, 1[s \le m^+]}{\sum_{s \in S^+} 1[s \le m^+]} + \lambda
            \frac{\sum_{s \in S^-} (s - m^-) \, 1[s \ge m^-]}{\sum_{s \in S^-} 1[s \ge m^-]}

    S+ holds the similarities of the pairs of one class in the batch, without those of an image and itself, S- those of
    different classes. A mean over no pair is 0, with gradient 0. Only hard pairs count, so the term does not compress
    classes that are already separable by a threshold between the margins.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> term = ThresholdConsistency(Sphere(2))
        >>> points = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.8, 0.6]])  # similarities 0.6, 0.8 and 0.96
        >>> round(term(points, torch.tensor([0, 0, 1])).item(), 4)  # (0.9 - 0.6) + ((0.8 - 0.5) + (0.96 - 0.5)) / 2
        0.68
    """

    weight: PositiveFloat = recipe_key(default=1.0)
    """lambda+, weight of the positive pairs relative to the loss; it also multiplies negative_weight."""
    negative_weight: NonNegativeFloat = 1.0
    """lambda- / lambda+, weight of the negative pairs relative to that of the positive pairs."""
    positive_margin: Annotated[float, Field(ge=-1, le=1)] = 0.9
    """m+, in similarity units; positive pairs below it are pulled together."""
    negative_margin: Annotated[float, Field(ge=-1, le=1)] = 0.5
    """m-, in similarity units; negative pairs above it are pushed apart."""

    def requirements(self) -> Iterable[Requirement]:
        pairs = "it compares images with others of their class and with those of other classes"
        return NEEDS_BOUNDED, Requirement("sampler.pairs", ("of the same class and of different classes",), pairs)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        similarity = self.manifold.relative_similarity(embeddings, embeddings)  # (B, B)
        same = labels[:, None] == labels
        positive = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        pull, push = self.positive_margin - similarity, similarity - self.negative_margin
        return mean_where(pull, positive & (pull >= 0)) + self.negative_weight * mean_where(push, ~same & (push >= 0))
