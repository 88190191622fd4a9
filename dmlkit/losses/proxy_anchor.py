"""Proxy-Anchor loss: one learnable proxy per class pulls its class and pushes the others."""

from collections.abc import Iterable

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from dmlkit.component import Requirement, option
from dmlkit.losses.proxies.classes import Block, Classes, Terms, anchor_terms
from dmlkit.losses.proxies.proxy_loss import ClassSumLoss
from dmlkit.losses.proxies.transport_weights import ALL_CLASSES, TransportWeights
from dmlkit.manifolds.base import NEEDS_BOUNDED


class AnchorLoss(ClassSumLoss):
    """A loss over proxies with the terms of `ProxyAnchor`, which weight the images of a batch by how hard they are."""

    margin: NonNegativeFloat = 0.1
    """delta, in similarity units (cosine on the sphere)."""
    scale: PositiveFloat = 32.0
    """alpha, inverse temperature."""
    transport: TransportWeights | None = option(default=None, init=False)

    def requirements(self) -> Iterable[Requirement]:
        return (NEEDS_BOUNDED,) if self.transport is None else (NEEDS_BOUNDED, *ALL_CLASSES)

    def class_terms(self, block: Block) -> Terms:
        return anchor_terms(block, self.scale, self.margin)

    def over(self, classes: Classes) -> Tensor:
        loss = super().over(classes)
        return loss if self.transport is None else loss + self.transport(classes, self.scale, self.margin)


class ProxyAnchor(AnchorLoss, name="proxy_anchor"):
    r"""Proxy-Anchor (Kim et al. 2020): each class proxy weights the images of the batch by how hard they are.

    Kim et al., CVPR 2020 (arXiv:2003.13911), eq. 4; s = relative similarity, P+ = classes in the batch.

    .. math:: \frac{1}{|P^+|} \sum_{p \in P^+} \log(1 + \sum_{y_x = p} e^{-\alpha (s(x,p) - \delta)})
            + \frac{1}{|P|} \sum_{p \in P} \log(1 + \sum_{y_x \ne p} e^{\alpha (s(x,p) + \delta)})

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> ProxyAnchor(Sphere(2), num_classes=10)(torch.eye(2), torch.tensor([3, 7])).shape
        torch.Size([])
    """

    transport: TransportWeights | None = None
    """Weights (1 + x) from transport plans of grouplets; null for none."""
