"""SoftTriple loss: a softmax over classes that have several centers each."""

from functools import partial

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from dmlkit.losses.proxies.centers import over_all_centers, pool_centers
from dmlkit.losses.proxies.classes import Classes
from dmlkit.losses.proxies.softmax import RowLosses, SoftmaxLoss


class SoftTriple(SoftmaxLoss, name="soft_triple"):
    r"""SoftTriple (Qian et al. 2019): cross-entropy over classes with several centers each.

    Qian et al., ICCV 2019 (arXiv:1909.05235), eq. 7-10, with any similarity s and distance d.

    .. math:: S_{ic} &= \sum_k \frac{e^{s(x_i, w_{ck}) / \gamma}}{\sum_l e^{s(x_i, w_{cl}) / \gamma}} s(x_i, w_{ck}) \\
        L &= \frac{1}{B} \sum_i -\log \frac{e^{\lambda (S_{iy_i} - \delta)}}
            {e^{\lambda (S_{iy_i} - \delta)} + \sum_{c \ne y_i} e^{\lambda S_{ic}}}
            + \frac{\tau}{C K (K - 1)} \sum_c \sum_{s < t} d(w_{cs}, w_{ct})

    On the sphere d is sqrt(2 - 2 <w, w'>), here with a finite gradient at w = w'.

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> sphere = Sphere(8)
        >>> loss = SoftTriple(sphere, num_classes=5, centers_per_class=2)
        >>> loss(sphere.from_features(torch.randn(4, 8)), torch.arange(4)).shape
        torch.Size([])
    """

    centers_per_class: PositiveInt = 10
    """K, centers per class."""
    scale: PositiveFloat = 20.0
    """lambda, inverse temperature of the softmax."""
    gamma: PositiveFloat = 0.1
    """Temperature of the softmax over the centers of a class, in similarity units."""
    margin: NonNegativeFloat = 0.01
    """delta, in similarity units."""
    regularizer_weight: NonNegativeFloat = 0.2
    """tau, weight of the distances between the centers of a class."""

    def __post_init__(self) -> None:
        super().__post_init__(self.centers_per_class, partial(pool_centers, kind="softmax", gamma=self.gamma))
        self.logit_scale = self.scale

    def row_losses(self, others: Tensor, own_logits: Tensor) -> RowLosses:
        return super().row_losses(others, own_logits - self.scale * self.margin)

    def over(self, classes: Classes) -> Tensor:
        loss = super().over(classes)
        if self.regularizer_weight == 0 or self.centers_per_class == 1:
            return loss
        return loss + over_all_centers(self.manifold, classes, self.regularizer_weight)
