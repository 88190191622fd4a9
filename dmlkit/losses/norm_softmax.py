"""Normalized softmax loss: cross-entropy over similarities to one learnable proxy per class."""

from typing import Literal

from pydantic import PositiveFloat

from dmlkit.losses.proxies.proxy_loss import ProxyLossConfig, SoftmaxLoss
from dmlkit.manifolds.base import Manifold


class NormSoftmaxConfig(ProxyLossConfig, frozen=True):
    """Normalized softmax (Zhai & Wu 2019): cross-entropy with cosines to the proxies as logits."""

    name: Literal["norm_softmax"] = "norm_softmax"
    temperature: PositiveFloat = 0.05
    """sigma, in similarity units."""

    def build(self, manifold: Manifold, num_classes: int) -> "NormSoftmax":
        return NormSoftmax(manifold, num_classes, **self.options())


class NormSoftmax(SoftmaxLoss):
    r"""Zhai & Wu, BMVC 2019 (arXiv:1811.12649), eq. 3, with any similarity s in place of the cosine.

    .. math:: \frac{1}{B} \sum_i -\log \frac{e^{s(x_i, p_{y_i}) / \sigma}}{\sum_c e^{s(x_i, p_c) / \sigma}}

    Args:
        manifold: the geometry of embeddings and proxies.
        num_classes: C; each class has one proxy.
        temperature: sigma > 0, in similarity units.
        chunk_size: see `ProxyLoss`.
        negative_fraction: the fraction of the classes that a training step computes, in (0, 1].

    Raises:
        ValueError: see `Loss.forward`.

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> loss = NormSoftmax(Sphere(2), num_classes=2, temperature=1.0)
        >>> _ = loss.proxies.data.copy_(torch.eye(2))
        >>> round(loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0])).item(), 4)  # log(1 + 1/e)
        0.3133
    """

    def __init__(
        self,
        manifold: Manifold,
        num_classes: int,
        *,
        temperature: float = 0.05,
        chunk_size: int | None = None,
        negative_fraction: float = 1.0,
    ) -> None:
        super().__init__(
            manifold,
            num_classes,
            logit_scale=1 / temperature,
            chunk_size=chunk_size,
            negative_fraction=negative_fraction,
        )
