"""Multi-Proxies Anchor loss: Proxy-Anchor with several proxies per class."""

from collections.abc import Iterable
from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.losses.base import LossConfig
from dmlkit.losses.proxies.anchor_loss import TRANSPORT_REQUIREMENTS, AnchorLoss
from dmlkit.losses.proxies.centers import Pooling, mean_center_distance, pool_centers
from dmlkit.losses.proxies.proxy_loss import NegativeFraction
from dmlkit.losses.proxies.transport_weights import TransportWeights, TransportWeightsConfig
from dmlkit.manifolds.base import Manifold


class MPAConfig(LossConfig, frozen=True):
    """Multi-Proxies Anchor (Saeki et al. 2022): Proxy-Anchor for classes with several local centers."""

    shards_proxies: ClassVar[bool] = True
    name: Literal["mpa"] = "mpa"
    proxies_per_class: PositiveInt = 10  # K; 10 on CUB and Cars, 2 on SOP
    class_similarity: Pooling = "softmax"  # of a point to the K proxies of a class
    margin: NonNegativeFloat = 0.1  # delta, in similarity units (cosine on the sphere)
    scale: PositiveFloat = 32.0  # alpha, inverse temperature
    gamma: PositiveFloat = 0.1  # temperature of the choice between the proxies of a class, in similarity units
    regularizer_weight: NonNegativeFloat = 0.2  # tau
    transport: TransportWeightsConfig | None = None  # weights (1 + x) from transport plans of grouplets
    chunk_size: PositiveInt | None = None  # classes computed at a time; None chooses by size
    negative_fraction: NegativeFraction = 1.0  # of the classes: a step computes the batch's own and random others

    def requirements(self) -> Iterable[Requirement]:
        return () if self.transport is None else TRANSPORT_REQUIREMENTS

    def build(self, manifold: Manifold, num_classes: int) -> "MPA":
        transport = None if self.transport is None else self.transport.build()
        options = self.model_dump(exclude={"name", "transport"})
        return MPA(manifold, num_classes, transport=transport, **options)


class MPA(AnchorLoss):
    r"""Saeki et al. 2022 (arXiv:2110.03997), eq. 1, 3, 6 and 7, with any similarity s and distance d.

    .. math:: S(x, c) &= \sum_k \frac{e^{s(x, w_{ck}) / \gamma}}{\sum_l e^{s(x, w_{cl}) / \gamma}} s(x, w_{ck}) \\
        L &= \frac{1}{|C^+|} \sum_{c \in C^+} \log(1 + \sum_{y_x = c} e^{-\alpha (S(x, c) - \delta)})
            + \frac{1}{C} \sum_c \log(1 + \sum_{y_x \ne c} e^{\alpha (S(x, c) + \delta)})
            + \frac{\tau}{C K (K - 1)} \sum_c \sum_{s < t} d(w_{cs}, w_{ct})

    With K = 1 it is Proxy-Anchor. D: alpha, which the paper does not print, is Proxy-Anchor's 32. D: the second mean
    is over all classes, as in Proxy-Anchor, also where a batch holds a single class. On the sphere d is
    sqrt(2 - 2 <w, w'>), here with a gradient that is finite at w = w'.

    Args:
        manifold: the geometry of embeddings and proxies.
        num_classes: C.
        proxies_per_class: K >= 1; with one proxy there is no regularizer.
        class_similarity: S from the K similarities: ``softmax`` as above, ``max`` or ``mean``.
        margin: delta >= 0, in similarity units.
        scale: alpha > 0, inverse temperature.
        gamma: > 0, temperature of the softmax between the proxies of a class, in similarity units.
        regularizer_weight: tau >= 0, how much the distances between the proxies of a class count.
        transport: weights (1 + x_ij) from the transport plans x of random grouplets, as in `Grouplet`; none if None.
        chunk_size: how many classes to compute at a time; None chooses by size. The value does not depend on it.
        negative_fraction: the part of the classes that a training step computes, in (0, 1], see `ProxyLoss`.

    Raises:
        ValueError: see `Loss.forward`.

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> sphere = Sphere(8)
        >>> loss = MPA(sphere, num_classes=5, proxies_per_class=2)
        >>> loss(sphere.from_features(torch.randn(4, 8)), torch.arange(4)).shape
        torch.Size([])
    """

    def __init__(
        self,
        manifold: Manifold,
        num_classes: int,
        *,
        proxies_per_class: int = 10,
        class_similarity: Pooling = "softmax",
        margin: float = 0.1,
        scale: float = 32.0,
        gamma: float = 0.1,
        regularizer_weight: float = 0.2,
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
            proxies_per_class=proxies_per_class,
            pool=pool_centers(class_similarity, gamma),
            chunk_size=chunk_size,
            negative_fraction=negative_fraction,
        )
        self.regularizer_weight = regularizer_weight

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        selection = self.select(embeddings, labels)
        loss = self.anchor_terms(selection, embeddings, labels)
        if self.regularizer_weight == 0 or self.proxies.shape[1] == 1:
            return loss
        return loss + self.regularizer_weight * mean_center_distance(self.manifold, selection)
