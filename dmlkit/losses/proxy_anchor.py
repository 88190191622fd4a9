"""Proxy-Anchor loss: one learnable proxy per class pulls its class and pushes the others."""

from typing import Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn.functional import one_hot, softplus

from dmlkit.losses.base import Loss, LossConfig
from dmlkit.manifolds.base import Manifold


class ProxyAnchorConfig(LossConfig, frozen=True):
    """Proxy-Anchor (Kim et al. 2020): each class proxy weighs the batch by how hard it is."""

    name: Literal["proxy_anchor"] = "proxy_anchor"
    margin: NonNegativeFloat = 0.1  # delta, in similarity units (cosine on the sphere)
    scale: PositiveFloat = 32.0  # alpha, inverse temperature

    def build(self, manifold: Manifold, num_classes: int) -> "ProxyAnchor":
        return ProxyAnchor(manifold, num_classes, margin=self.margin, scale=self.scale)


class ProxyAnchor(Loss):
    r"""Kim et al., CVPR 2020 (arXiv:2003.13911), eq. 4; s = manifold similarity, P+ = classes in the batch.

    .. math:: \frac{1}{|P^+|} \sum_{p \in P^+} \log(1 + \sum_{y_x = p} e^{-\alpha (s(x,p) - \delta)})
            + \frac{1}{|P|} \sum_{p \in P} \log(1 + \sum_{y_x \ne p} e^{\alpha (s(x,p) + \delta)})

    Args:
        manifold: the geometry of embeddings and proxies.
        num_classes: C, one proxy each.
        margin: delta >= 0, in similarity units.
        scale: alpha > 0, inverse temperature.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> sphere = Sphere(64)
        >>> loss = ProxyAnchor(sphere, num_classes=10)
        >>> embeddings = sphere.from_features(torch.randn(8, 64))
        >>> loss(embeddings, torch.arange(8)).shape
        torch.Size([])
    """

    def __init__(self, manifold: Manifold, num_classes: int, *, margin: float = 0.1, scale: float = 32.0) -> None:
        super().__init__(manifold, num_classes)
        self.margin, self.scale = margin, scale
        self.proxies = manifold.new_proxies(num_classes)  # (C, d)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        proxies = self.manifold.proxy_points(self.proxies)  # (C, D)
        similarity = self.manifold.similarity(embeddings, proxies)  # (B, C)
        is_own = one_hot(labels, len(proxies)).bool()  # (B, C)
        pull = log1p_sum_exp(-self.scale * (similarity - self.margin), where=is_own)  # (C,)
        push = log1p_sum_exp(self.scale * (similarity + self.margin), where=~is_own)  # (C,)
        return pull.sum() / is_own.any(0).sum() + push.mean()


def log1p_sum_exp(x: Tensor, where: Tensor) -> Tensor:
    """log(1 + sum_i exp(x_i)) over dim 0, for the entries kept by ``where``; 0 if none is kept."""
    return softplus(x.masked_fill(~where, -torch.inf).logsumexp(0))
