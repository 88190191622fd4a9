"""Proxy-Anchor loss: one learnable proxy per class pulls its class and pushes the others."""

from collections.abc import Iterable
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.losses.base import NEEDS_BOUNDED, require_bounded
from dmlkit.losses.proxies.classes import Block, Classes, Terms, anchor_terms
from dmlkit.losses.proxies.proxy_loss import ClassSumLoss, ProxyLossConfig
from dmlkit.losses.proxies.similarity import log_one_plus_sum_exp
from dmlkit.losses.proxies.transport_weights import ALL_CLASSES, TransportWeights, TransportWeightsConfig
from dmlkit.manifolds.base import Manifold


class ProxyAnchorConfig(ProxyLossConfig, frozen=True):
    """Proxy-Anchor (Kim et al. 2020): each class proxy weights the images of the batch by how hard they are."""

    name: Literal["proxy_anchor"] = "proxy_anchor"
    margin: NonNegativeFloat = 0.1
    """delta, in similarity units (cosine on the sphere)."""
    scale: PositiveFloat = 32.0
    """alpha, inverse temperature."""
    transport: TransportWeightsConfig | None = None
    """Weights (1 + x) from transport plans of grouplets; null for none."""

    def requirements(self) -> Iterable[Requirement]:
        return (NEEDS_BOUNDED,) if self.transport is None else (NEEDS_BOUNDED, *ALL_CLASSES)

    def build(self, manifold: Manifold, num_classes: int) -> "ProxyAnchor":
        transport = None if self.transport is None else self.transport.build()
        return ProxyAnchor(manifold, num_classes, transport=transport, **self.options("transport"))


class ProxyAnchor(ClassSumLoss):
    r"""Kim et al., CVPR 2020 (arXiv:2003.13911), eq. 4; s = relative similarity, P+ = classes in the batch.

    .. math:: \frac{1}{|P^+|} \sum_{p \in P^+} \log(1 + \sum_{y_x = p} e^{-\alpha (s(x,p) - \delta)})
            + \frac{1}{|P|} \sum_{p \in P} \log(1 + \sum_{y_x \ne p} e^{\alpha (s(x,p) + \delta)})

    Args:
        manifold, num_classes: see `Loss`; each class has one proxy.
        margin: delta >= 0, in similarity units.
        scale: alpha > 0, inverse temperature.
        transport: weights (1 + x_ij) from the transport plans x of random grouplets, as in `Grouplet`; None for none.
        chunk_size, negative_fraction: see `ProxyLoss`; with ``transport``, negative_fraction must be 1.

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> ProxyAnchor(Sphere(2), num_classes=10)(torch.eye(2), torch.tensor([3, 7])).shape
        torch.Size([])
    """

    def __init__(
        self,
        manifold: Manifold,
        num_classes: int,
        *,
        margin: float = 0.1,
        scale: float = 32.0,
        transport: TransportWeights | None = None,
        chunk_size: int | None = None,
        negative_fraction: float = 1.0,
    ) -> None:
        super().__init__(manifold, num_classes, chunk_size=chunk_size, negative_fraction=negative_fraction)
        require_bounded("ProxyAnchor", manifold)
        self.margin, self.scale, self.transport = margin, scale, transport

    def class_terms(self, block: Block) -> Terms:
        if self.closed_form:
            return anchor_terms(block, self.scale, self.margin)
        pull = log_one_plus_sum_exp(-self.scale * (block.similarity - self.margin), where=block.own)
        push = log_one_plus_sum_exp(self.scale * (block.similarity + self.margin), where=~block.own)
        return pull / block.classes.in_batch + push / block.classes.total

    def over(self, classes: Classes) -> Tensor:
        loss = super().over(classes)
        return loss if self.transport is None else loss + self.transport(classes, self.scale, self.margin)
