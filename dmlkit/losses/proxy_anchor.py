"""Proxy-Anchor loss: one learnable proxy per class pulls its class and pushes the others."""

from collections.abc import Iterable
from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.losses.base import LossConfig
from dmlkit.losses.proxies.anchor_loss import TRANSPORT_REQUIREMENTS, AnchorLoss
from dmlkit.losses.proxies.proxy_loss import NegativeFraction
from dmlkit.losses.proxies.transport_weights import TransportWeights, TransportWeightsConfig
from dmlkit.manifolds.base import Manifold


class ProxyAnchorConfig(LossConfig, frozen=True):
    """Proxy-Anchor (Kim et al. 2020): each class proxy weighs the batch by how hard it is."""

    shards_proxies: ClassVar[bool] = True
    name: Literal["proxy_anchor"] = "proxy_anchor"
    margin: NonNegativeFloat = 0.1  # delta, in similarity units (cosine on the sphere)
    scale: PositiveFloat = 32.0  # alpha, inverse temperature
    transport: TransportWeightsConfig | None = None  # weights (1 + x) from transport plans of grouplets
    chunk_size: PositiveInt | None = None  # classes computed at a time; None chooses by size
    negative_fraction: NegativeFraction = 1.0  # of the classes: a step computes the batch's own and random others

    def requirements(self) -> Iterable[Requirement]:
        return () if self.transport is None else TRANSPORT_REQUIREMENTS

    def build(self, manifold: Manifold, num_classes: int) -> "ProxyAnchor":
        transport = None if self.transport is None else self.transport.build()
        options = self.model_dump(exclude={"name", "transport"})
        return ProxyAnchor(manifold, num_classes, transport=transport, **options)


class ProxyAnchor(AnchorLoss):
    r"""Kim et al., CVPR 2020 (arXiv:2003.13911), eq. 4; s = manifold similarity, P+ = classes in the batch.

    .. math:: \frac{1}{|P^+|} \sum_{p \in P^+} \log(1 + \sum_{y_x = p} e^{-\alpha (s(x,p) - \delta)})
            + \frac{1}{|P|} \sum_{p \in P} \log(1 + \sum_{y_x \ne p} e^{\alpha (s(x,p) + \delta)})

    Args:
        manifold: the geometry of embeddings and proxies.
        num_classes: C, one proxy each.
        margin: delta >= 0, in similarity units.
        scale: alpha > 0, inverse temperature.
        transport: weights (1 + x_ij) from the transport plans x of random grouplets, as in `Grouplet`; none if None.
        chunk_size: how many classes to compute at a time; None chooses by size. The value does not depend on it.
        negative_fraction: the part of the classes that a training step computes, in (0, 1], see `ProxyLoss`.

    Raises:
        ValueError: see `Loss.forward`; or embeddings and proxies differ in dtype.

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> sphere = Sphere(64)
        >>> loss = ProxyAnchor(sphere, num_classes=10)
        >>> embeddings = sphere.from_features(torch.randn(8, 64))
        >>> loss(embeddings, torch.arange(8)).shape
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
        super().__init__(
            manifold,
            num_classes,
            margin=margin,
            scale=scale,
            transport=transport,
            chunk_size=chunk_size,
            negative_fraction=negative_fraction,
        )

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return self.anchor_terms(self.select(embeddings, labels), embeddings, labels)
