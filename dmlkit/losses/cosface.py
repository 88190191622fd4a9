"""CosFace loss: a softmax over cosines, with a margin subtracted from the cosine of the row's own class."""

from collections.abc import Iterable
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.losses.base import require_similarity
from dmlkit.losses.proxies.proxy_loss import ProxyLossConfig, SoftmaxLoss
from dmlkit.losses.proxies.softmax import RowLosses
from dmlkit.manifolds.base import Manifold

SIMILARITIES = ("cosine", "origin_cosine")
REASON = "its margin is a difference of cosines"


class CosFaceConfig(ProxyLossConfig, frozen=True):
    """CosFace (Wang et al. 2018): cross-entropy of cosines, with a cosine margin on the own class."""

    name: Literal["cosface"] = "cosface"
    margin: NonNegativeFloat = 0.35
    """m, in units of the cosine."""
    scale: PositiveFloat = 64.0
    """s, inverse temperature."""

    def requirements(self) -> Iterable[Requirement]:
        return (Requirement("manifold.similarity", SIMILARITIES, REASON),)

    def build(self, manifold: Manifold, num_classes: int) -> "CosFace":
        return CosFace(manifold, num_classes, **self.options())


class CosFace(SoftmaxLoss):
    r"""Wang et al., CVPR 2018 (arXiv:1801.09414), eq. 4.

    .. math:: \frac{1}{B} \sum_i -\log
        \frac{e^{s (\cos\theta_{y_i} - m)}}{e^{s (\cos\theta_{y_i} - m)} + \sum_{c \ne y_i} e^{s \cos\theta_c}}

    Args:
        manifold: the geometry of embeddings and proxies; its similarity must be a cosine.
        num_classes: C; each class has one proxy.
        margin: m >= 0, in units of the cosine.
        scale: s > 0, inverse temperature.
        chunk_size: see `ProxyLoss`.
        negative_fraction: the fraction of the classes that a training step computes, in (0, 1].

    Raises:
        ValueError: the manifold's similarity is not a cosine; see also `Loss.forward`.

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> loss = CosFace(Sphere(2), num_classes=2, scale=1.0, margin=1.0)
        >>> _ = loss.proxies.data.copy_(torch.eye(2))
        >>> round(loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0])).item(), 4)  # the margin cancels the lead: log(2)
        0.6931
    """

    def __init__(
        self,
        manifold: Manifold,
        num_classes: int,
        *,
        margin: float = 0.35,
        scale: float = 64.0,
        chunk_size: int | None = None,
        negative_fraction: float = 1.0,
    ) -> None:
        super().__init__(
            manifold,
            num_classes,
            logit_scale=scale,
            chunk_size=chunk_size,
            negative_fraction=negative_fraction,
        )
        require_similarity("CosFace", manifold, SIMILARITIES, REASON)
        self.margin, self.scale = margin, scale

    def row_losses(self, others: Tensor, own: Tensor) -> RowLosses:
        return super().row_losses(others, own - self.scale * self.margin)
